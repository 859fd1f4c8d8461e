"""Finds ready messages by their ids quickly, from where they were seen before.

They are in Kombu's own lists, which have no ids and are shared with the stock transport. Messages
enter a list at its head and leave it at its tail, so that the place of each follows from how many
have entered since.
"""

from __future__ import annotations

import json
import os
from bisect import bisect, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from threading import RLock
from typing import Any, NamedTuple

from ...message.envelope import open_envelope
from ...store.store import Store
from ..lookup import Found
from .lists import Ready, ReadyLists, id_of

#: How many messages of one list, and of all, are remembered by id. Longer lists must be read by the
#: caller.
MOST, MOST_OF_ALL = 200_000, 1_000_000

#: How many messages may have been added since the last look. After more, the list is read until a
#: known one is met.
FRESH = 500

#: How many of the newest messages are known by their texts, since the newest may be taken out.
RECENT = 50


class Placed(NamedTuple):
    """A ready message, and the lists in which it was found."""

    lists: ReadyLists
    ready: Ready

    def found(self) -> Found:
        """Return it as the result of a lookup."""
        step, message = self.ready.step, self.ready.message
        return Found("ready", self.lists.queue, step, message, open_envelope(message, 0).due_ms)


class _Look(NamedTuple):
    """Ids to look for in one list."""

    lists: ReadyLists
    step: int
    ids: Sequence[str]

    @property
    def key(self) -> tuple[str, int]:
        return self.lists.queue, self.step

    def ready(self, at: int, text: bytes) -> Ready:
        return self.lists.ready(self.step, at, text)

    def met(self, answer: Sequence[Any], fresh: Mapping[str, Ready]) -> dict[str, Ready]:
        """Return its messages in an answer, by id: those newly added, or else at their places."""
        found = {}
        for id, at, text in zip(self.ids, answer[::2], answer[1::2], strict=False):
            if (message := fresh.get(id)) is None and text:
                message = self.ready(at, text)
                message = message if id_of(message.message) == id else None
            if message is not None:
                found[id] = message
        return found


@dataclass
class _Known:
    """The messages seen in one list, numbered in the order of their arrival."""

    numbers: dict[str, int] = field(default_factory=dict)
    #: Ids that several messages had, and the numbers of those taken out by this process, in order.
    shared: set[str] = field(default_factory=set)
    gone: list[int] = field(default_factory=list)
    #: The number of the newest message, and the SHA-1s of the newest ones by number.
    count: int = 0
    recent: dict[int, str] = field(default_factory=dict)
    #: Reentrant: a signal handler may interrupt a thread that has just taken it.
    lock: Any = field(default_factory=RLock)

    @property
    def newest(self) -> str:
        """The SHA-1 of the newest message; empty if none is known."""
        return self.recent[max(self.recent)] if self.recent else ""

    def add(self, ids: Sequence[str], digests: Sequence[str]) -> None:
        """Add messages, the newest first, and the SHA-1s of the first of them."""
        numbers = range(self.count + len(ids), 0, -1)
        recent = {**self.recent, **dict(zip(numbers, digests[:RECENT], strict=False))}
        self.recent = {number: recent[number] for number in sorted(recent)[-RECENT:]}
        for id in reversed(ids):
            self.count += 1
            if self.place(id) >= 0:
                self.shared.add(id)
            self.numbers[id] = self.count

    def place(self, id: str) -> int:
        """Return how many newer messages there were when the newest one came; -1 if unknown."""
        number = self.numbers.get(id)
        if number is None:
            return -1
        return self.count - number - (len(self.gone) - bisect(self.gone, number))

    def change(self, id: str, text: bytes | None) -> None:
        """Record a message's new text, or None: it was taken out, and older ones have moved up."""
        if (number := self.numbers.get(id)) is None:
            return
        if text is None:
            del self.numbers[id]
            insort(self.gone, number)
            self.recent.pop(number, None)
        elif number in self.recent:
            self.recent[number] = _digest(text)

    def forget(self, length: int) -> None:
        """Forget most of the messages that have left the list."""
        keep = length + FRESH
        if len(self.gone) > 2 * keep:
            self.gone = self.gone[-keep:]
        keep += len(self.gone)
        if len(self.numbers) > 2 * keep:
            oldest = self.count - keep
            self.numbers = {id: n for id, n in self.numbers.items() if n > oldest}
            self.shared &= self.numbers.keys()

    def begin_anew(self) -> None:
        """Forget everything."""
        self.numbers, self.shared, self.gone, self.recent = {}, set(), [], {}


class ReadyIndex:
    """Where ready messages are, as far as this process has looked. Threads may share it.

    The first look at a list reads all of it, later ones only what was added since.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], _Known] = {}
        self._pid = os.getpid()

    def find(
        self, store: Store, queues: Sequence[str], id: str, most: int = MOST
    ) -> tuple[list[Placed], bool]:
        """Return the ready messages with an id, and whether all lists were short enough to know.

        A queue is one shard. Lists of more than `most` messages are not read for the first time. A
        message that is put back or moved meanwhile may be missed. If several in one list share an
        id, the latest is found: see `is_shared`.
        """
        found, is_sure = self.find_all(store, {queue: [id] for queue in queues}, most)
        return [each for placed in found.values() for each in placed], is_sure

    def find_all(
        self, store: Store, ids: Mapping[str, Sequence[str]], most: int = MOST
    ) -> tuple[dict[tuple[str, str], list[Placed]], bool]:
        """Like `find`, for several ids in each queue. Returns the messages by queue and id."""
        if self._pid != os.getpid():  # a lock may have been held when the process was forked
            self._known, self._pid = {}, os.getpid()
        looks = [
            _Look(lists, step, ids[lists.queue])
            for lists in (self.lists(store, queue) for queue in ids)
            for step in lists.steps
        ]
        found: dict[tuple[str, str], list[Placed]] = {}
        unread, is_sure = self._look(store, looks, found, most)
        if unread:
            short = [each for each in unread if self._read(each)]
            self._look(store, short, found, most)
            is_sure = is_sure and len(short) == len(unread)
        return found, is_sure

    def is_shared(self, queues: Sequence[str], id: str) -> bool:
        """Return whether several messages of one list have had this id."""
        known = [*self._known.items()]
        return any(queue in queues and id in each.shared for (queue, _), each in known)

    def lists(self, store: Store, queue: str) -> ReadyLists:
        """Return the lists of a queue. Changes made through them require no new reading."""
        return ReadyLists(store, queue, self._was_changed)

    def _was_changed(self, queue: str, step: int, id: str, text: bytes | None) -> None:
        if (known := self._known.get((queue, step))) is not None:
            with known.lock:
                known.change(id, text)

    def _look(
        self,
        store: Store,
        looks: Sequence[_Look],
        found: dict[tuple[str, str], list[Placed]],
        most: int,
    ) -> tuple[list[_Look], bool]:
        """Look at some lists together, and add the messages to `found`.

        Returns the lists that must be read first, and whether none is too long for that.
        """
        asked = []
        for each in looks:
            known = self._known.setdefault(each.key, _Known())
            with known.lock:
                newest = known.newest
                places = [(known.place(id), json.dumps(id)) for id in each.ids]
            asked.append((known, newest, each.lists.find_call(each.step, newest, places)))
        answers = store.all_of(call for _, _, call in asked)
        unread, is_sure = [], True
        for each, (known, newest, _), (length, since, *answer) in zip(
            looks, asked, answers, strict=True
        ):
            texts = answer[2 * len(each.ids) :]
            fresh = [each.ready(n, one) for n, one in enumerate(texts)]
            ids = [id_of(one.message) for one in fresh]
            with known.lock:
                if since >= 0 and known.newest == newest:  # no other thread has added these
                    known.add(ids, [*map(_digest, texts[:RECENT])])
                known.forget(length)
            met = each.met(answer, dict(zip(reversed(ids), reversed(fresh), strict=True)))
            for id, message in met.items():
                found.setdefault((each.lists.queue, id), []).append(Placed(each.lists, message))
            texts_of = zip(each.ids, answer[1::2], strict=False)
            missed = [id for id, text in texts_of if not text and id not in met]
            if since < 0 and length > most:
                is_sure = False
            elif since < 0 or any(self._was_shifted(each, known, id, length) for id in missed):
                unread.append(each._replace(ids=missed))
        return unread, is_sure

    def _read(self, look: _Look) -> bool:
        """Read a list until a known message is met. Returns False if it is too long."""
        known = self._known.setdefault(look.key, _Known())
        with known.lock:  # other threads wait, and use the result
            fresh: dict[str, str] = {}  # SHA-1 -> id: new messages move others on
            start, has_more = 0, True
            while has_more and known.newest not in fresh:
                looked_at, has_more, page = look.lists.page(look.step, start)
                start += looked_at
                for each in page:
                    fresh.setdefault(_digest(each.kept), id_of(each.message))
                if len(fresh) > MOST:
                    return False
            digests = [*fresh]
            if known.newest in fresh:
                digests = digests[: digests.index(known.newest)]
            else:
                known.begin_anew()
            known.add([fresh[each] for each in digests], digests)
        if sum(len(each.numbers) for each in [*self._known.values()]) > MOST_OF_ALL:
            self._known = {look.key: known}
        return True

    def _was_shifted(self, look: _Look, known: _Known, id: str, length: int) -> bool:
        """Return whether others took messages out of the middle, so that all places are wrong."""
        with known.lock:
            if id not in known.numbers or not length:
                return False
            _, _, last = look.lists.page(look.step, length - 1)
            if not last or known.place(id_of(last[-1].message)) in (-1, length - 1):
                return False
            known.begin_anew()
            return True


def _digest(message: bytes) -> str:
    return sha1(message, usedforsecurity=False).hexdigest()
