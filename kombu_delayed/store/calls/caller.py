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

#: A key has at most about so many bytes of messages. Tools move ten keys at a time to another node:
#: that stalls a server for less than 100 ms.
DEFAULT_BUCKET_BYTES = 400_000

#: What a script answers that takes compressed messages no more.
PLAIN = b"plain"

#: Messages in one call of a script: a call stays below a few milliseconds, and below Lua's stack.
CALL_LIMIT = 250

#: One call in so many trims the stream of events that it writes to, and lets it live on. Each tells
#: of a few hundred messages at the most: far fewer in all than the ten thousand that the server
#: cuts off at once.
TRIM_CALLS = 10

#: So does the first one after so long, for a queue of which little is told.
TRIM_SECONDS = 1.0

#: So many streams are remembered.
TRIM_STREAMS = 4096

T = TypeVar("T")
Self = TypeVar("Self", bound="Caller")


@lru_cache(maxsize=16)
def _caches(
    prefix: str, steps: tuple[int, ...], separator: str, is_cluster: bool
) -> tuple[Callable[[str], QueueKeys], Callable[..., dict[str, Any]]]:
    """The keys of a queue, and what scripts take of it: the same for all stores of a process."""

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
    """When a message counts as poison (0: never), and how many dead letters are kept how long."""

    max_deliveries: int = 20
    dead_limit: int = 100_000
    dead_seconds: float = 90 * 86_400


class Trimming:
    """Which calls trim the streams of events. Threads may share it."""

    def __init__(self) -> None:
        self._rests: dict[str, tuple[int, float]] = {}

    def bound(self, stream: str, limit: int) -> int:
        """The limit of a stream for the next script: below 0 where that need not trim it."""
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
    """How many messages went where: into the backlog, to ready at once, or were there already."""

    delayed: int
    ready: int
    already: int


class Caller:
    """Runs scripts, each with the keys of a queue. A queue is one shard: see `shards`.

    On a Cluster, whose `client` are `Nodes`, each queue is in one slot, and so on one node.

    `now` is "" for the server's clock, `+ms` for that clock set forward, or a time in milliseconds
    since the epoch; tests move it. About `event_limit` lifecycle events are kept of each queue; 0:
    none are written. What sends messages waits for `replicas`, and raises NotReplicated where too
    few have them in time. With a `format`, it raises FormatError for data of a newer one. Large
    backlogs are compressed as `compression` says: "zstd", or "" for not at all.
    """

    #: Of so many queues one call renews the leases.
    renewals_at_once = 250

    #: Of so many queues one command can tell.
    look_limit = 100

    #: Errors of one queue's node, which other queues do not share.
    errors_of_one_queue: tuple[type[BaseException], ...] = ()

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
        #: Which node of a Cluster has what; None: there is one server.
        self.cluster = self.run.cluster
        if self.cluster:  # where all keys of a command have to be in one slot
            self.renewals_at_once = self.look_limit = 1
            self.errors_of_one_queue = UNREACHABLE
        self.shards = self._new_shards(prefix, shards)
        self.replicas = replicas
        self.partition_size = partition_size
        #: How large a bucket may become; 0: nothing is spread over buckets.
        self.bucket_bytes = bucket_bytes
        self.limits = limits or Limits()
        self.event_limit = event_limit
        self._trimming = Trimming()
        self.now = now
        #: Queues with large backlogs, as far as is known: what is sent there is packed.
        self.large: set[str] = set()
        self.compression = compression
        self.known_dictionaries = Known()
        #: Where scripts are known to work that nobody waits for: a server may have lost them.
        self._posted_over: dict[tuple[ServerConnection, str], int] = {}
        steps = tuple(sorted(priority_steps))
        self.keys, self._known = _caches(prefix, steps, separator, bool(self.cluster))

    def over(self: Self, client: Any) -> Self:
        """The same store over other connections."""
        other = copy(self)
        other.client, other.run = client, self._connect(client)
        other._posted_over = {}
        return other

    def hang_up(self) -> None:
        """Close its connections; what needs one opens it again."""
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
        """The queue whose keys have this in braces."""
        return queue_with(tag) if self.cluster else tag

    def node_of(self, queue: str) -> Node:
        """The node of a Cluster that has a queue. Raises NodeDown where none has."""
        node: Node = self.cluster.node(slot_of(("", self.keys(queue).wake)))
        return node

    def without(self: Self, nodes: Collection[Node]) -> Self:
        """The same store without the shards that some nodes of a Cluster have."""
        other = copy(self)
        other.shards = self.shards.without(partial(self._has_a_node, nodes.__contains__))
        return other

    def _is_down(self, queue: str) -> bool:
        return self._has_a_node(self.cluster.is_down, queue)

    def _has_a_node(self, of_which: Callable[[Node], bool], queue: str) -> bool:
        """Whether something is true of a queue's node, or there is none."""
        try:
            return of_which(self.node_of(queue))
        except NodeDown:
            return True

    @property
    def dictionaries(self) -> Dictionaries:
        """With what its queues' messages are compressed."""
        return Dictionaries(self)

    def send(self, *command: Any) -> Any:
        """What sends messages: it waits for replicas, and for a slot that moves."""
        answer = self.run.insist(*command, replicas=self.replicas)
        return self.sent_plain(command) if answer == PLAIN else answer

    def sent_plain(self, command: Sequence[Any]) -> Any:
        """Send again, as it was, what a queue does not take compressed any more."""
        plain, version = compressing.undone(command)
        self.dictionaries.refused(version)
        return self.run.insist(*plain, replicas=self.replicas)

    def call(self, name: str, queue: str, owner: str | None = None, /, **given: Any) -> Call:
        """A script and all that it takes: what is given, and what is known by the same names.

        Known are the keys of the queue and what this store was made with. `owner` is the consumer
        or the job that some of the keys are of.
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
        """Run a script, with what it takes as in `call`."""
        move, all_given = self.call(name, queue, owner, **given)
        return move(self.run, **all_given)

    def in_pages(
        self, name: str, queue: str, owner: str | None = None, /, **given: Any
    ) -> Iterator[list[Any]]:
        """Run a script until its cursor is 0 again; what it returns behind that, call by call."""
        cursor, more = b"0", True
        while more:
            answer = self.ask(name, queue, owner, cursor=cursor, **given)
            cursor, *page = answer if isinstance(answer, list) else [answer]
            yield page
            more = cursor != b"0"

    def packer(self, queue: str, expires_ms: int) -> tuple[Packer, str]:
        """What makes records for a queue, and the dictionary with which it compresses some.

        A queue with an expiry leaves nothing behind, so it has no dictionaries.
        """
        if queue not in self.large:
            return whole, ""
        if self.compression and expires_ms == 0:
            return self.dictionaries.packer(queue)
        return pack, ""

    def fields(self, queue: str, hash: str, names: Sequence[str | bytes]) -> list[bytes | None]:
        """What a hash that is spread over buckets has under some names."""
        found = self.ask("records", queue, hash=hash, fields=names) if names else []
        return [
            record and self.unpacked(queue, name, record)
            for name, record in zip(names, found, strict=True)
        ]

    def unpacked(self, queue: str, name: str | bytes, record: bytes) -> bytes:
        """A record as it was before it was packed or compressed. Raises as `readable`."""
        return self.readable(queue, unpack(name, record))

    def readable(self, queue: str, text: bytes) -> bytes:
        """A message, or a record that is not packed, as it was before it was compressed.

        What is damaged stays as it is. Raises CompressionError without the extra.
        """
        if compressing.MARK not in text:
            return text
        try:
            return compressing.expand(text)
        except compressing.Unknown:
            with suppress(MessageError):
                return self.dictionaries.readable(queue, text)
        except MessageError:
            pass
        return text

    def together(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts of many queues in one go; where one was refused, its error is its answer."""
        return send_together(self.run.many, calls)

    def all_of(self, calls: Iterable[Call]) -> list[Any]:
        """As `together`. Raises the first error."""
        return without_errors(self.together([*calls]))

    def post(
        self,
        move: Script,
        given: dict[str, Any],
        on_error: Callable[[], None],
        on_answer: Callable[[Any], None] = ignore,
    ) -> None:
        """Send a script and do not wait for its answer, over connections that are known to work.

        Over others it waits. `on_error` and `on_answer` are called as by `ServerConnection.post`.
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
        """What the script that schedules has answered."""
        *counts, is_large = numbers(answer)
        (self.large.add if is_large else self.large.discard)(queue)
        return Scheduled(*counts)

    def tell_of_burials(self, queue: str, ids: Sequence[bytes]) -> None:
        """Tell who wants to know of messages that a script has buried."""
        instrumentation.tell_of_burials(
            self, queue, [id.decode(errors="surrogateescape") for id in ids]
        )


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
