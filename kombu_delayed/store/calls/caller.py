"""Runs the scripts with the keys of a queue, over the connections of one database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import lru_cache, partial
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from ...connection.cluster.connection import ClusterConnection, Nodes, slot_of
from ...connection.cluster.nodes import Node
from ...connection.commands import Replicas, ignore, numbers
from ...connection.connection import ServerConnection
from ...connection.format import Format
from ...errors import UNREACHABLE, MessageError, NodeDown
from ...message import compressing
from ...message.filled import pack
from ...message.packing import unpack, whole
from ..dictionaries import Dictionaries, Known, Packer
from ..keys import SEPARATOR, QueueKeys
from . import instrumentation
from .scripts import Call, Script, script, send_together
from .shard_placement import hash_tag, queue_with
from .shards import QueueShards, Shards

DEFAULT_PARTITION_SIZE = 128

#: A key has at most about this many bytes of messages. Tools move ten keys at a time to another
#: node, and with this size that stalls a server for less than 100 ms.
DEFAULT_BUCKET_BYTES = 400_000

#: The answer of a script that does not take compressed messages any more.
PLAIN = b"plain"

#: Messages in one call of a script. It then takes a few milliseconds at most and fits Lua's stack.
CALL_LIMIT = 250

#: One call in this many trims the stream of events that it writes to and extends its expiry. A call
#: records a few hundred messages at most, so that is far less than the ten thousand entries that
#: the server trims at once.
TRIM_CALLS = 10

#: The first call after this time trims too, for a queue with few events.
TRIM_SECONDS = 1.0

#: How many streams are remembered.
TRIM_STREAMS = 4096

T = TypeVar("T")
Self = TypeVar("Self", bound="Caller")


@lru_cache(maxsize=16)
def _caches(
    prefix: str, steps: tuple[int, ...], separator: str, is_cluster: bool
) -> tuple[Callable[[str], QueueKeys], Callable[..., dict[str, Any]]]:
    """Cached queue keys and script arguments, shared by all stores of a process alike."""

    @lru_cache(maxsize=1024)
    def keys_of(queue: str) -> QueueKeys:
        return QueueKeys(queue, prefix, steps, separator, hash_tag(queue) if is_cluster else "")

    @lru_cache(maxsize=1024)
    def known(
        name: str,
        queue: str,
        owner: str | None,
        now: str,
        partition_size: int,
        bucket_bytes: int,
        limits: Limits,
    ) -> dict[str, Any]:
        keys, takes = keys_of(queue), script(name)
        found = {
            **takes.keys_among(keys, owner),
            "steps": keys.steps,
            "now": now,
            "partition_size": partition_size,
            "bucket_bytes": bucket_bytes,
            "event_limit": 0,
            "max_deliveries": limits.max_deliveries,
            "dead_limit": limits.dead_limit,
            "dead_age_ms": int(limits.dead_seconds * 1000),
        }
        if owner is not None:
            found["consumer"] = owner
        return {name: value for name, value in found.items() if name in takes.names}

    return keys_of, known


class Limits(NamedTuple):
    """When a message counts as poison (0: never), and how many dead letters are kept, how long."""

    max_deliveries: int = 20
    dead_limit: int = 100_000
    dead_seconds: float = 90 * 86_400


class Trimming:
    """Decides which calls trim the streams of events. Thread-safe."""

    def __init__(self) -> None:
        self._rests: dict[str, tuple[int, float]] = {}

    def bound(self, stream: str, limit: int) -> int:
        """The limit of a stream for the next script: negative if that need not trim it."""
        calls, until = self._rests.get(stream, (0, 0.0))
        now = monotonic()
        if calls and now < until:
            self._rests[stream] = calls - 1, until
            return -limit
        if len(self._rests) >= TRIM_STREAMS:
            self._rests.clear()
        self._rests[stream] = TRIM_CALLS - 1, now + TRIM_SECONDS
        return limit


class Scheduled(NamedTuple):
    """How many messages went into the backlog, were ready at once, or were there already."""

    delayed: int
    ready: int
    already: int


class Caller:
    """Runs scripts, each with the keys of a queue. A queue is one shard: see `shards`.

    On a Cluster, `client` is a `Nodes`, and each queue is in one slot and so on one node.

    `now` is "" for the server's clock, `+ms` for that clock set forward, or a time in milliseconds
    since the epoch; tests move it. About `event_limit` lifecycle events are kept per queue; 0
    writes none. Calls that send messages wait for `replicas` and raise NotReplicated if too few
    have the messages in time. With a `format`, calls raise FormatError for data of a newer format.
    `compression` of large backlogs is "zstd", or "" for none.
    """

    #: In how many queues one call renews the leases.
    renewals_at_once = 250

    #: How many queues one command can check.
    look_limit = 100

    #: Errors that concern only the node of one queue, not other queues.
    errors_of_one_queue: tuple[type[BaseException], ...] = ()

    #: The store that other threads use, if one thread keeps this one's connections to itself.
    for_others: Caller | None = None

    def __init__(
        self,
        client: Any,
        *,
        prefix: str = "",
        priority_steps: Iterable[int] = (0, 3, 6, 9),
        separator: str = SEPARATOR,
        partition_size: int = DEFAULT_PARTITION_SIZE,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        limits: Limits | None = None,
        event_limit: int = 0,
        shards: int | Mapping[str, int] = 1,
        replicas: Replicas | None = None,
        format: Format | None = None,
        compression: str = "",
        now: str = "",
    ) -> None:
        self.client = client
        self.format = format
        self.run = self._connect(client)
        #: The map of a Cluster's nodes; None for a single server.
        self.cluster = self.run.cluster
        if self.cluster:  # all keys of a command must be in one slot
            self.renewals_at_once = self.look_limit = 1
            self.errors_of_one_queue = UNREACHABLE
        self.shards = self._new_shards(prefix, shards)
        self.replicas = replicas
        self.partition_size = partition_size
        #: The maximum size of a bucket; 0: hashes are not spread over buckets.
        self.bucket_bytes = bucket_bytes
        self.limits = limits or Limits()
        self.event_limit = event_limit
        self._trimming = Trimming()
        self.now = now
        #: Queues known to have large backlogs: messages sent to them are packed.
        self.large: set[str] = set()
        self.compression = compression
        self.known_dictionaries = Known()
        #: Connections whose server is known to have a script. Only there can it be posted.
        self._posted_over: dict[tuple[ServerConnection, str], int] = {}
        steps = tuple(sorted(set(priority_steps)))
        self.keys, self._known = _caches(prefix, steps, separator, bool(self.cluster))

    def over(self: Self, client: Any) -> Self:
        """The same store over other connections."""
        other = copy(self)
        other.client, other.run = client, self._connect(client)
        other._posted_over = {}
        return other

    def hang_up(self) -> None:
        """Close the connections; the next call opens them again."""
        (self.client if self.cluster else self.client.connection_pool).disconnect()

    def _connect(self, client: Any) -> ServerConnection:
        if isinstance(client, Nodes):
            return ClusterConnection(client.cluster, client.pool, self.format)
        return ServerConnection(client.connection_pool, self.format)

    def _new_shards(self, prefix: str, configured: int | Mapping[str, int]) -> Shards:
        if self.cluster:
            return QueueShards(self.run, prefix, configured, self._is_down)
        return Shards(self.run, prefix, configured)

    def queue_with(self, tag: str) -> str:
        """The queue whose keys have this tag in braces."""
        return queue_with(tag) if self.cluster else tag

    def node_of(self, queue: str) -> Node:
        """The node of a Cluster that has a queue. Raises NodeDown if none has it."""
        node: Node = self.cluster.node(slot_of(("", self.keys(queue).wake)))
        return node

    def without(self: Self, nodes: Collection[Node]) -> Self:
        """The same store without the shards on these nodes of a Cluster."""
        other = copy(self)
        other.shards = self.shards.without(partial(self._has_a_node, nodes.__contains__))
        return other

    def _is_down(self, queue: str) -> bool:
        return self._has_a_node(self.cluster.is_down, queue)

    def _has_a_node(self, of_which: Callable[[Node], bool], queue: str) -> bool:
        """Whether `of_which` is true of the queue's node, or the queue has none."""
        try:
            return of_which(self.node_of(queue))
        except NodeDown:
            return True

    @property
    def dictionaries(self) -> Dictionaries:
        """The dictionaries that compress the messages of queues."""
        return Dictionaries(self)

    def now_ms(self) -> int:
        """The time in ms by the clock of a single server, as the scripts see it."""
        if self.now[:1] not in ("", "+"):
            return int(self.now)
        seconds, microseconds = self.run("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000 + int(self.now or 0)

    def send(self, *command: Any) -> Any:
        """Run a command that sends messages: waits for replicas, and for a slot that moves."""
        answer = self.run.insist(*command, replicas=self.replicas)
        return self.sent_plain(command) if answer == PLAIN else answer

    def sent_plain(self, command: Sequence[Any]) -> Any:
        """Send messages again without compression, because the queue does not take them with it."""
        plain, version = compressing.undone(command)
        self.dictionaries.refused(version)
        return self.run.insist(*plain, replicas=self.replicas)

    def call(self, name: str, queue: str, owner: str | None = None, /, **given: Any) -> Call:
        """A script with its arguments: the `given` ones, and by name those that the store knows.

        It knows the keys of the queue and its own settings. `owner` is the consumer or the job to
        which some of the keys belong.
        """
        is_spread = self.format is None or self.format.has_buckets
        bucket_bytes = self.bucket_bytes if is_spread else 0
        known = self._known(
            name, queue, owner, self.now, self.partition_size, bucket_bytes, self.limits
        )
        if self.event_limit and "event_limit" in known:
            given["event_limit"] = self._trimming.bound(known["events"], self.event_limit)
        return script(name), {**known, **given}

    def ask(self, name: str, queue: str, owner: str | None = None, /, **given: Any) -> Any:
        """Run a script, with arguments as in `call`."""
        move, all_given = self.call(name, queue, owner, **given)
        return move(self.run, **all_given)

    def in_pages(
        self, name: str, queue: str, owner: str | None = None, /, **given: Any
    ) -> Iterator[list[Any]]:
        """Run a script until its cursor is 0 again; yields the rest of each answer."""
        cursor, more = b"0", True
        while more:
            answer = self.ask(name, queue, owner, cursor=cursor, **given)
            cursor, *page = answer if isinstance(answer, list) else [answer]
            yield page
            more = cursor != b"0"

    def packer(self, queue: str, expires_ms: int) -> tuple[Packer, str]:
        """The function that makes records for a queue, and the dictionary that it compresses with.

        A queue with an expiry leaves nothing behind, so it has no dictionaries.
        """
        if queue not in self.large:
            return whole, ""
        if self.compression and expires_ms == 0:
            return self.dictionaries.packer(queue)
        return pack, ""

    def fields(self, queue: str, hash: str, names: Sequence[str | bytes]) -> list[bytes | None]:
        """The values of fields of a hash that is spread over buckets; None for a missing field."""
        found = self.ask("records", queue, hash=hash, fields=names) if names else []
        return [
            record and self.unpacked(queue, name, record)
            for name, record in zip(names, found, strict=True)
        ]

    def unpacked(self, queue: str, name: str | bytes, record: bytes) -> bytes:
        """Unpack and decompress a record. Raises the errors of `readable`."""
        return self.readable(queue, unpack(name, record))

    def readable(self, queue: str, text: bytes) -> bytes:
        """Decompress a message, or a record that is not packed.

        A damaged message is returned unchanged. Raises CompressionError without the extra.
        """
        if compressing.MARK in text:
            with suppress(MessageError):
                return self.dictionaries.readable(queue, text)
        return text

    def together(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts of many queues in one go. The answer of a refused script is its error."""
        return send_together(self.run.many, calls)

    def all_of(self, calls: Iterable[Call]) -> list[Any]:
        """Run scripts `together`. Raises the first error."""
        return without_errors(self.together([*calls]))

    def post(
        self,
        move: Script,
        given: dict[str, Any],
        on_error: Callable[[], None],
        on_answer: Callable[[Any], None] = ignore,
    ) -> None:
        """Send a script without waiting for its answer, if the server is known to have the script.

        Otherwise it waits. `on_error` and `on_answer` are called as by `ServerConnection.post`.
        """
        command = ("EVALSHA", move.sha, *move.pack(given))
        connection = self.run.to(command)
        known = connection, move.name
        if self._posted_over.get(known) != (generation := connection.generation):
            answer = move(self.run, **given)
            self._posted_over[known] = generation
            on_answer(answer)
            return

        def failed() -> None:
            self._posted_over.pop(known, None)
            on_error()

        if on_answer is not ignore:
            on_answer = instrumentation.timed(move.name, on_answer)
        connection.post(*command, on_error=failed, on_answer=on_answer)

    def scheduled(self, queue: str, answer: bytes) -> Scheduled:
        """Read the answer of the script that schedules."""
        *counts, is_large = numbers(answer)
        (self.large.add if is_large else self.large.discard)(queue)
        return Scheduled(*counts)


def without_errors(answers: list[Any]) -> list[Any]:
    """The answers. Raises the first error among them."""
    for error in answers:
        if isinstance(error, BaseException):
            raise error
    return answers


def chunks(entries: Sequence[T], limit: int | None = None) -> Iterable[Sequence[T]]:
    size = limit or CALL_LIMIT
    if 0 < len(entries) <= size:
        return (entries,)
    return (entries[at : at + size] for at in range(0, len(entries), size))
