"""Finds the keys whose names only a scan of all key names shows, in one scan for all queues."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from ...store.store import CALL_LIMIT, Store
from ..backlog import scan


@dataclass
class Names:
    """Names in the keys of one queue, as a scan found them. Each may be gone since."""

    #: Partitions that are missing in the index.
    strays: set[bytes] = field(default_factory=set)
    #: Consumers with unacknowledged messages.
    holders: set[bytes] = field(default_factory=set)
    #: Consumers with slots at the gate.
    slots: set[bytes] = field(default_factory=set)


class _Survey:
    """Sorts the keys of some queues by what their names say."""

    def __init__(self, store: Store, queues: Collection[str]) -> None:
        self._store = store
        self.found = {queue: Names() for queue in queues}
        self._partitions: dict[str, list[bytes]] = {queue: [] for queue in queues}
        #: The beginning of a key -> where the rest of it goes.
        self._notes: dict[bytes, Callable[[bytes], None]] = {}
        for queue, names in self.found.items():
            keys = store.keys(queue)
            self._notes[keys.delayed.encode()] = partial(self._note_partition, queue)
            self._notes[keys.unacked("").encode()] = names.holders.add
            self._notes[keys.slots("").encode()] = names.slots.add

    def note(self, key: bytes) -> None:
        """Sort one key."""
        for mark in (b"}:delayed:", b"}:unacked:", b"}:gate:slots:"):
            start, _, name = key.rpartition(mark)
            if add := self._notes.get(start + mark):
                add(name)

    def _note_partition(self, queue: str, name: bytes) -> None:
        if name != b"waiting":  # beside the partitions: see `QueueKeys.waiting`
            self._partitions[queue].append(name)
            if len(self._partitions[queue]) == CALL_LIMIT:
                self._check(queue)

    def _check(self, queue: str) -> None:
        partitions, self._partitions[queue] = self._partitions[queue], []
        self.found[queue].strays.update(missing(self._store, queue, partitions))

    def check_rest(self) -> None:
        """Look for those partitions in the index that were not checked yet."""
        for queue in self._partitions:
            self._check(queue)


def survey(store: Store, queues: Collection[str]) -> dict[str, Names]:
    """Return the names of each queue."""
    made = _Survey(store, queues)
    start, pattern = store.keys("").prefix, "{*}:*"
    if len(queues) == 1:
        start, pattern = store.keys(*queues).delayed.removesuffix("delayed:"), "*"
    for key in scan(store, start, pattern):
        made.note(key)
    made.check_rest()
    return made.found


def missing(store: Store, queue: str, partitions: Collection[bytes]) -> list[bytes]:
    """Return the partitions that are not in the index of the queue."""
    if not partitions:
        return []
    bounds = store.run("ZMSCORE", store.keys(queue).partitions, *partitions)
    return [name for name, bound in zip(partitions, bounds, strict=True) if bound is None]
