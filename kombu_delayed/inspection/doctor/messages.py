"""Examines the backlog and the keys beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...connection.commands import pairs
from ...store.store import CALL_LIMIT, chunks
from .examination import Examination, next_page, text
from .survey import missing

#: How many passes are made at most to repair the index.
PASSES = 10


class Messages:
    """The messages of a queue, the index of their due times, and their names and notes."""

    def __init__(self, case: Examination) -> None:
        self._case = case
        self._store, self._keys = case.store, case.keys
        #: Members whose entry has a fault, which the pass over the messages meets again.
        self._known: set[bytes] = set()

    def examine(self) -> None:
        """Examine all of it, and the dead letters and the ledgers of jobs."""
        # A partition that splits before it is repaired may move faults behind the reader.
        for _ in range(PASSES if self._case.fix else 1):
            if not self._index():
                break
        self._strays()
        self._messages()
        self._names()
        self._notes()
        self._case.sweep_parts("repair_dead", ("dead", "messages", "reasons"))
        self._case.sweep("repair_ledgers")
        self._dictionaries()

    def _dictionaries(self) -> None:
        """Report dictionaries that are gone, and those of an empty queue without consumers.

        Consumers of such a queue would have dropped them.
        """
        dictionaries, queue = self._store.dictionaries, self._case.queue
        for version, member in dictionaries.lost(queue).items():
            name = f"{text(version)} (message {text(member)})"
            self._case.add("undecodable", name, fixed=False)
        if not dictionaries.are_unused(queue):
            return
        self._case.add("dictionary", self._keys.dictionaries)
        if self._case.fix:
            dictionaries.forget_unused(queue, 0)

    def _index(self) -> int:
        """Examine the partition index. Returns how many faults there were."""
        faults = 0
        limit, more = next_page(), 1
        place: list[Any] = [b"", b"-inf", -1]
        while more:
            looked_at = dict(zip(("name", "bound", "offset"), place, strict=True))
            more, *found = self._case.ask("audit_index", **looked_at, limit=limit)
            place, (count, size), suspects = found[:3], found[3:5], found[5:]
            limit = next_page(count, size)
            self._case.progress(count)
            faults += self._judge(pairs(suspects))
        return faults

    def _strays(self) -> None:
        """Examine partitions that are missing in the index."""
        for name in self._case.names.strays:
            if not missing(self._store, self._case.queue, [name]):
                continue  # it is new, or was put into the index meanwhile
            key, start = self._keys.delayed.encode() + name, 0
            while members := self._store.run("ZRANGE", key, start, start + CALL_LIMIT - 1):
                faults = self._judge([(name, member) for member in members])
                # A repair removes members, so that the next ones move up.
                start += len(members) - (faults if self._case.fix else 0)

    def _messages(self) -> None:
        cursor, limit = b"0", next_page()
        while True:
            cursor, count, size, *members = self._case.ask(
                "audit_messages", cursor=cursor, count=limit
            )
            limit = next_page(count, size)
            self._case.progress(count)
            self._judge([(b"", member) for member in members if member not in self._known])
            if cursor == b"0":
                return

    def _judge(self, suspects: list[tuple[bytes, bytes]]) -> int:
        """Report suspects with a fault, and repair them with `fix`. Returns how many there were."""
        count = 0
        for part in chunks(suspects):
            for (name, member), fault in zip(part, self._repair(part), strict=True):
                if fault:
                    count += 1
                    self._case.add(fault.decode(), text(member or name))
                    if name and not self._case.fix:
                        self._known.add(member)
        return count

    def _repair(self, entries: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        parts = [part for entry in entries for part in entry]
        answer: list[bytes] = self._case.ask("repair", fixes=int(self._case.fix), entries=parts)
        return answer

    def _names(self) -> None:
        """Examine shared ids and unique keys, which keep other messages out."""
        self._case.sweep("repair_duplicates")
        self._case.sweep_parts("repair_unique", ("unique", "due"))

    def _notes(self) -> None:
        """Examine notes of expectations, and early answers."""
        keys = self._keys
        for notes, until in (
            (keys.expectations, keys.expectations_until),
            (keys.answers, keys.answers_until),
        ):
            given = {"notes": notes, "notes_until": until}
            self._case.sweep_parts("repair_notes", ("notes", "until"), **given)
