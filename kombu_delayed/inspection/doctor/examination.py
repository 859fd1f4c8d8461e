"""The examination of one queue, the faults that it may find, and how they are repaired."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ...connection.commands import pairs
from ...store.store import Store
from .survey import Names

#: How many messages one call looks at, and about how many bytes of them.
PAGE_SIZE = 200
PAGE_BYTES = 1_000_000

Progress = Callable[[int], None]

#: How many examples of one kind of fault are kept.
EXAMPLES = 3

#: Kind of fault -> what it means, what `fix` does about it.
KINDS = {
    "nodes": ("nodes of the Cluster do not answer", ""),
    "server": ("the server's settings", ""),
    "format": ("the messages have an older format", ""),
    "foreign": (
        "keys were overwritten by another program: delete or rename them, and give the broker a "
        "database of its own",
        "",
    ),
    "paused": ("queue is paused, which workers before 0.2 and stock workers ignore", ""),
    "lease": (
        "consumers with an expired lease hold messages that no other consumer has reclaimed",
        "reclaimed",
    ),
    "unregistered": ("messages are held by consumers that have no lease", "reclaimed"),
    "empty": ("partitions in the index have no messages", "dropped from the index"),
    "lost": ("entries in the index have no message", "dropped from the index"),
    "orphan": ("messages have no entry in the index, so they never run", "put into the index"),
    "time": ("entries and their messages differ in the due time", "set to the message's time"),
    "misplaced": ("entries are in the wrong partition for their due time", "moved"),
    "unreadable": ("records in the backlog cannot be read", "buried"),
    "duplicate": ("ids are marked as shared by several messages, but are not", "forgotten"),
    "key": ("unique keys have no message or no due time", "forgotten, or given its due time"),
    "leftover": (
        "unique keys belong to messages that are gone; later messages clear them",
        "forgotten",
    ),
    "past": ("ledgers of jobs have expired; later jobs clear them", "dropped"),
    "dictionary": ("no message needs the dictionaries for compression any more", "dropped"),
    "undecodable": (
        "messages are compressed with a dictionary that is gone: restore it, or a backup",
        "",
    ),
    "slots": ("the count of slots in use is wrong", "counted anew"),
    "stuck": ("messages wait at the gate but are in no line", "put in line"),
    "gone": ("entries at the gate have no message", "dropped"),
    "note": (
        "notes of expectations have no time or cannot be read",
        "corrected, or deleted",
    ),
    "unheard": ("expectations wait, but no answer would find them", "linked to their keys again"),
    "dead-lost": ("dead letters have no message", "dropped"),
    "dead-orphan": (
        "dead letters have lost their reason, or their time, without which `celery delayed dead "
        "list` does not show them: list them again with --fix, then replay or purge them",
        "listed again",
    ),
    "step": (
        "lists of ready messages have a priority step that is not in the option priority_steps "
        "here, so workers with the same option never run them",
        "",
    ),
    "silent": ("messages can be claimed, but no consumer was told", "wake tokens added"),
    "untaken": (
        "a live consumer without messages takes no wake token (its log may say that it cannot "
        "apply the policies)",
        "wake tokens added again",
    ),
}

#: Kinds that occur in normal operation.
HARMLESS = frozenset({"dictionary", "format", "leftover", "past", "paused"})


@dataclass
class Finding:
    """One kind of fault in a queue (or of the server, then without one), and how often."""

    kind: str
    queue: str = ""
    count: int = 0
    fixed: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def meaning(self) -> str:
        """A description of the fault."""
        return KINDS[self.kind][0]

    @property
    def remedy(self) -> str:
        """The effect of a repair; empty if it has none."""
        return KINDS[self.kind][1]

    @property
    def is_wrong(self) -> bool:
        """Whether faults of this kind are left that should not be there."""
        return self.fixed < self.count and self.kind not in HARMLESS

    def add(self, example: str, fixed: bool, count: int = 1) -> None:
        """Count `count` more."""
        self.count += count
        self.fixed += count if fixed else 0
        if len(self.examples) < EXAMPLES:
            self.examples.append(example)


class Examination:
    """The state that all its parts share. With `fix` they repair what they find."""

    def __init__(
        self, store: Store, queue: str, names: Names, fix: bool, progress: Progress
    ) -> None:
        self.store = store
        self.queue = queue
        self.names = names
        self.fix = fix
        self.progress = progress
        self.keys = store.keys(queue)
        self.found: dict[str, Finding] = {}

    def add(self, kind: str, example: str, *, fixed: bool | None = None) -> None:
        """Count one more fault of a kind."""
        finding = self.found.setdefault(kind, Finding(kind, self.queue))
        finding.add(example, self.fix if fixed is None else fixed)

    def ask(self, name: str, /, **given: Any) -> Any:
        """Run a script on the queue."""
        return self.store.ask(name, self.queue, **given)

    def sweep_parts(self, name: str, parts: Iterable[str], **given: Any) -> None:
        """Like `sweep`, over several keys, each of which may lack what another one has."""
        seen: set[bytes] = set()
        for part in parts:
            seen = self.sweep(name, seen, part=part, **given)

    def sweep(self, name: str, seen: Iterable[bytes] = (), **given: Any) -> set[bytes]:
        """Run a script over all entries, page by page. Returns the faulty ones and `seen`."""
        known, cursor, limit = {*seen}, b"0", next_page()
        while True:
            cursor, count, size, *found = self.ask(
                name, cursor=cursor, count=limit, fixes=int(self.fix), **given
            )
            limit = next_page(count, size)
            for id, fault in pairs(found):
                if id not in known:
                    known.add(id)
                    self.add(fault.decode(), text(id))
            if cursor == b"0":
                return known


def next_page(count: int = 0, size: int = 0) -> int:
    """Return how many messages the next call looks at, after `count` with `size` bytes."""
    return max(min(PAGE_SIZE, PAGE_BYTES * count // max(size, 1)), 1) if count else PAGE_SIZE


def text(name: bytes) -> str:
    """Return a name as it is shown."""
    return name.decode(errors="backslashreplace")
