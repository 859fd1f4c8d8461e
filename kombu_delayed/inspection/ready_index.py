"""Finds ready messages by their ids at once, by where they have been before.

They are in Kombu's own lists, which know no ids and are shared with the stock transport. Messages
come to the head of a list and leave it at the tail, so that the place of each is told by how many
have come since it was met.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from threading import Lock

from ..message.envelope import open_envelope
from ..store.store import Store
from .lookup import Found
from .ready import ReadyLists, id_of

#: Ids of so many messages are remembered of one list, and of all; longer lists are read by whoever
#: looks.
MOST, MOST_OF_ALL = 200_000, 1_000_000

#: So many may have come since the last look; after more the list is read until a known one is met.
FRESH = 500


@dataclass
class _Known:
    """What has been met in one list: its messages are numbered as they came."""

    numbers: dict[str, int] = field(default_factory=dict)
    #: The number of the newest message, and its SHA-1; empty: none is known.
    count: int = 0
    newest: str = ""
    lock: Lock = field(default_factory=Lock)

    def add(self, ids: Sequence[str], newest: str) -> None:
        """Messages that have come, the newest first, and the SHA-1 of that one."""
        for id in reversed(ids):
            self.count += 1
            self.numbers[id] = self.count
        if ids:
            self.newest = newest

    def forget(self, length: int) -> None:
        """Forget most of those that have left the list."""
        if len(self.numbers) > 2 * length + FRESH:
            oldest = self.count - length - FRESH
            self.numbers = {id: n for id, n in self.numbers.items() if n > oldest}


class ReadyIndex:
    """Where ready messages are, as far as this process has looked. Threads may share it.

    The first look at a list reads it, later ones what has come since.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], _Known] = {}
        self._pid = os.getpid()

    def find(self, store: Store, queues: Sequence[str], id: str) -> tuple[list[Found], bool]:
        """The ready messages with an id, and whether all lists were short enough to know.

        A queue is one shard. A message that is put back or moved meanwhile may be passed over.
        """
        if self._pid != os.getpid():  # a lock may have been held when the process was forked
            self._known, self._pid = {}, os.getpid()
        lists = [
            (each, step) for each in (ReadyLists(store, q) for q in queues) for step in each.steps
        ]
        found, unread, is_sure = self._look(store, lists, id)
        if unread:
            short = [each for each in unread if self._read(*each)]
            found += self._look(store, short, id)[0]
            is_sure = is_sure and len(short) == len(unread)
        return found, is_sure

    def _look(
        self, store: Store, lists: Sequence[tuple[ReadyLists, int]], id: str
    ) -> tuple[list[Found], list[tuple[ReadyLists, int]], bool]:
        """Look at some lists in one go.

        Returns those as well that have to be read first, and whether none is too long for that.
        """
        needle, asked = json.dumps(id), []
        for ready, step in lists:
            known = self._known.setdefault((ready.queue, step), _Known())
            with known.lock:
                number = known.numbers.get(id)
                at = -1 if number is None else known.count - number
                asked.append((known, known.newest, ready.find_call(step, known.newest, at, needle)))
        answers = store.all_of(call for _, _, call in asked)
        found, unread, is_sure = [], [], True
        for each, (known, newest, _), answer in zip(lists, asked, answers, strict=True):
            length, since, _, message, *fresh = answer
            with known.lock:
                if since >= 0 and known.newest == newest:  # nobody else has added these
                    known.add([*map(id_of, fresh)], _digest(fresh[0]) if fresh else "")
                known.forget(length)
            message = next((one for one in fresh if id_of(one) == id), message)
            if since < 0 and length > MOST:
                is_sure = False
            elif since < 0 or (not message and self._was_shifted(each, known, id, length)):
                unread.append(each)
            if message and id_of(message) == id:
                due_ms = open_envelope(message, 0).due_ms
                found.append(Found("ready", each[0].queue, each[1], message, due_ms))
        return found, unread, is_sure

    def _read(self, ready: ReadyLists, step: int) -> bool:
        """Read a list until a message is met that is known; False: it is too long."""
        known = self._known.setdefault((ready.queue, step), _Known())
        with known.lock:  # others wait for this reading, and have its result
            fresh: dict[str, str] = {}  # SHA-1 -> id: what comes meanwhile moves others on
            start, has_more = 0, True
            while has_more and known.newest not in fresh:
                looked_at, has_more, page = ready.page(step, start)
                start += looked_at
                for each in page:
                    fresh.setdefault(_digest(each.message), id_of(each.message))
                if len(fresh) > MOST:
                    return False
            digests = [*fresh]
            if known.newest in fresh:
                digests = digests[: digests.index(known.newest)]
            known.add([fresh[each] for each in digests], digests[0] if digests else "")
        if sum(len(each.numbers) for each in [*self._known.values()]) > MOST_OF_ALL:
            self._known = {(ready.queue, step): known}
        return True

    def _was_shifted(self, at: tuple[ReadyLists, int], known: _Known, id: str, length: int) -> bool:
        """Whether others have taken messages out of the middle, so that all places are wrong."""
        ready, step = at
        with known.lock:
            if id not in known.numbers or not length:
                return False
            _, _, last = ready.page(step, length - 1)
            number = known.numbers.get(id_of(last[-1].message)) if last else None
            if number in (None, known.count - length + 1):
                return False
            known.numbers, known.newest = {}, ""
            return True


def _digest(message: bytes) -> str:
    return sha1(message, usedforsecurity=False).hexdigest()
