"""The examination of one queue, and its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...connection.commands import pairs
from ...store.store import Store
from .faults import Finding

#: How many messages one call looks at, and about how many bytes of them.
PAGE_SIZE = 200
PAGE_BYTES = 1_000_000

Progress = Callable[[int], None]


class Examination:
    """The state that all its parts share. With `fix` they repair what they find."""

    def __init__(self, store: Store, queue: str, fix: bool, progress: Progress) -> None:
        self.store = store
        self.queue = queue
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
