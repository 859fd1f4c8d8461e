"""Trains, stores and looks up the dictionaries that compress the messages of a queue.

They are fields of one hash: a version holds the dictionary, `since:<version>` the time when it was
trained, and `current` the version to compress with. A version stays as long as the queue has
messages, because any of them may need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Any, Protocol

from ..connection.commands import pairs
from ..connection.connection import ServerConnection
from ..connection.native import get_logger
from ..connection.stock import stock_consumers
from ..errors import CompressionError, MessageError, ServerFull
from ..message import compressing, zstd
from ..message.envelope import open_kept
from ..message.filled import compress, pack
from ..message.packing import glance, unpack

logger = get_logger(__name__)

#: How often a process asks Redis which dictionary is current.
LOOK_SECONDS = 30.0

#: How many messages one call reads.
CALL_LIMIT = 250

#: How many messages a dictionary is trained on, and the minimum for training.
SAMPLES, FEWEST_SAMPLES = 500, 100

#: Longer messages are not used as samples.
SAMPLE_BYTES = 20_000

#: How often a process checks whether a newly trained dictionary does better. The new one replaces
#: the current one if it saves this share of the stored bytes.
CHECK_MS, BETTER_BY = 86_400_000, 0.1

#: The maximum number of versions of a queue. After that the last one stays.
MOST_VERSIONS = 16

#: How long the dictionaries of an empty queue stay.
STAY_MS = 600_000

#: How often a consumer looks for empty queues among its own.
TIDY_SECONDS = 600.0

#: How long a queue counts as one that stock workers might consume before it is checked again.
SHARED_SECONDS = 600.0

#: Makes the record of a message from its id, the front of the record, and its text.
Packer = Callable[[str, str, str], "str | bytes"]


@dataclass
class Known:
    """A process's cache of facts about the dictionaries of queues."""

    #: queue -> the version to compress with (empty: none), and when to ask again.
    current: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    #: queue -> when to look next for dictionaries that no message needs any more.
    tidy_at: dict[str, float] = field(default_factory=dict)
    #: queue -> until when it counts as consumed by stock workers.
    shared_until: dict[str, float] = field(default_factory=dict)


class Asked(Protocol):
    """The part of a store that this module needs."""

    client: Any
    cluster: Any  #: None on a single server
    run: ServerConnection
    keys: Any  #: of a queue
    known_dictionaries: Known

    def ask(self, name: str, queue: str, /, **given: Any) -> Any:
        """Run a script."""

    def in_pages(self, name: str, queue: str, /, **given: Any) -> Iterator[list[Any]]:
        """Run a script until its cursor is 0 again."""


class Dictionaries:
    """The dictionaries of the queues of a store."""

    def __init__(self, store: Asked) -> None:
        self._store = store
        self._known = store.known_dictionaries

    # Compress.

    def packer(self, queue: str) -> tuple[Packer, str]:
        """The function that makes records for a large queue, and the version that some need."""
        version, ask_at = self._known.current.get(queue, (b"", 0.0))
        if monotonic() >= ask_at:
            try:
                version = self._look(queue)
            except ServerFull:  # sending the messages will raise it too
                version = b""
            self._known.current[queue] = version, monotonic() + LOOK_SECONDS
        codec = self.codec(queue, version) if version else None
        if codec is None:
            return pack, ""

        def packer(id: str, front: str, text: str) -> str | bytes:
            return compress(id, front, text, version, codec)

        return packer, version.decode()

    def _look(self, queue: str) -> bytes:
        """The version to compress with; empty if there is none yet."""
        version, is_to_check = self._store.ask("current_dictionary", queue, check_ms=CHECK_MS)
        if version:
            self._learn(queue, version)
        return self._replaced(queue, version) if is_to_check else bytes(version)

    def _replaced(self, queue: str, before: bytes) -> bytes:
        """Train a dictionary on delayed messages; returns the version to use from now on."""
        if self._known.shared_until.get(queue, 0.0) > monotonic():
            return before
        texts = [*islice(self._texts(queue), SAMPLES)]
        parts = [each.content for id, text in texts if (each := compressing.split(id, text))]
        if len(parts) < FEWEST_SAMPLES or (not before and self._is_shared(queue)):
            return before
        try:
            dictionary = zstd.train(parts[::2] if before else parts)
        except (
            Exception
        ) as error:  # each library has its own errors: messages are too few, or too similar
            logger.info("No dictionary can be trained for queue %r now: %s", queue, error)
            return before
        version, old = compressing.learn(dictionary), self.codec(queue, before)
        if old is not None and not _does_better(zstd.Codec(dictionary), old, parts[1::2]):
            return before
        given = {"before": before, "version": version, "text": dictionary, "most": MOST_VERSIONS}
        found = bytes(self._store.ask("keep_dictionary", queue, **given))
        if found and found != version:
            self._learn(queue, found)
        return found

    def _is_shared(self, queue: str) -> bool:
        """Whether stock workers might consume a queue: they lose compressed messages."""
        if self._store.cluster:  # the stock transport does not support it
            return False
        if (found := stock_consumers(self._store.client)) == []:
            return False
        self._known.shared_until[queue] = monotonic() + SHARED_SECONDS
        if found is None:
            logger.warning(
                "Queue %r is not compressed: the user of the broker URL may not list clients, so a "
                "worker of the stock transport, which loses compressed messages, would not be "
                "noticed. Give the user the right +client|list",
                queue,
            )
            return True
        logger.warning(
            "Queue %r is not compressed: %s waits in database %s with BRPOP, as workers of the "
            "stock transport do, which lose compressed messages. Stop it, or give it another "
            "database",
            queue,
            found[0] if len(found) == 1 else f"one of {len(found)} clients ({found[0]})",
            self._store.client.connection_pool.connection_kwargs.get("db") or 0,
        )
        return True

    def _texts(self, queue: str) -> Iterator[tuple[str, str]]:
        """Ids and texts of some delayed messages."""
        for member, record in self._some(queue):
            if len(record) <= SAMPLE_BYTES:
                with suppress(MessageError, UnicodeDecodeError):
                    text = open_kept(self.readable(queue, unpack(member, record))).message
                    yield member.decode().partition("\x1f")[0], text.decode()

    def _some(self, queue: str) -> Iterator[tuple[bytes, bytes]]:
        """Members and records of a few thousand delayed messages."""
        given = {"hash": self._store.keys(queue).messages, "count": CALL_LIMIT}
        for page in islice(self._store.in_pages("scan", queue, **given), 20):
            yield from pairs(page)

    def lost(self, queue: str) -> dict[bytes, bytes]:
        """The versions that the queue has lost, each with a delayed message that needs it."""
        needed = dict[bytes, bytes]()
        for member, record in self._some(queue):
            if (seen := glance(record)) is not None and seen.version:
                needed.setdefault(seen.version, member)
        there = self._store.run("HKEYS", self._store.keys(queue).dictionaries) if needed else ()
        return {version: member for version, member in needed.items() if version not in there}

    def refused(self, version: str) -> None:
        """Ask again for the current version: the server does not have this one for a queue."""
        current = self._known.current
        for queue in [each for each, (known, _) in [*current.items()] if known == version.encode()]:
            current.pop(queue, None)

    # Read.

    def readable(self, queue: str, text: bytes) -> bytes:
        """Decompress a message, or a record that is not packed.

        Raises CompressionError without the extra, MessageError for a damaged message.
        """
        try:
            return compressing.expand(text)
        except compressing.Unknown as error:
            self._learn(queue, error.version)
        return compressing.expand(text)

    def codec(self, queue: str, version: bytes) -> zstd.Codec | None:
        """The codec of a version; None if the queue has lost it. Raises CompressionError."""
        self._learn(queue, version)
        return compressing.known(version)

    def _learn(self, queue: str, version: bytes) -> None:
        """Load a dictionary of a queue into this process, unless the queue has lost it."""
        if compressing.known(version) is not None:
            return
        found = self._store.run("HGET", self._store.keys(queue).dictionaries, version)
        if found is not None:
            compressing.learn(found)

    def check(self, queue: str) -> None:
        """Raise CompressionError if a queue may have messages that cannot be read here."""
        if not zstd.is_installed() and self._store.run(
            "EXISTS", self._store.keys(queue).dictionaries
        ):
            raise CompressionError

    # Forget.

    def forget_unused(self, queue: str, stay_ms: int = STAY_MS) -> bool:
        """Let an empty queue's dictionaries expire (0: drop them now). Returns if it is empty."""
        return bool(self._store.ask("forget_dictionaries", queue, stay_ms=stay_ms))

    def are_unused(self, queue: str) -> bool:
        """Whether a queue has dictionaries that do not expire, but no message in any state."""
        left_ms = self._store.run("PTTL", self._store.keys(queue).dictionaries)
        return left_ms == -1 and self.forget_unused(queue, -1)

    def tidy(self, queues: Sequence[str], *, at_once: bool = False) -> None:
        """Drop the dictionaries that these queues no longer need: `at_once`, or now and then."""
        now, tidy_at = monotonic(), self._known.tidy_at
        due = [
            each
            for each in queues
            if tidy_at.setdefault(each, now + TIDY_SECONDS) <= now or at_once
        ]
        commands = [("EXISTS", self._store.keys(queue).dictionaries) for queue in due]
        for queue, found in zip(due, self._store.run.many(commands) if due else (), strict=True):
            tidy_at[queue] = now + TIDY_SECONDS
            if found == 1:
                self.forget_unused(queue)


def _does_better(new: zstd.Codec, before: zstd.Codec, contents: Sequence[bytes]) -> bool:
    """Whether a dictionary saves enough over the one before, on messages new to it."""
    sizes = [sum(len(each.compress(content)) for content in contents) for each in (new, before)]
    return sizes[0] <= sizes[1] * (1 - BETTER_BY)
