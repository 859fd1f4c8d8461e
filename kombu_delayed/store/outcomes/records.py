"""Records of outcomes, which workers write by task id. They outlast the messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...connection.commands import scored
from ..calls.caller import chunks, without_errors
from ..calls.scripts import Call
from ..store import Store

#: How often an idle worker reports that it is alive, and how long that counts.
BEAT_SECONDS, ALIVE_SECONDS = 10.0, 30.0

#: The lists of tasks that are sorted by time, and the name of each in Redis.
LISTS = {"failed": "failed-ids", "running": "running", "retrying": "retrying", "slow": "slow"}

#: How many tasks one call reads, and how many it records.
PAGE_SIZE, NOTES_LIMIT = 100, 500


@dataclass(slots=True)
class Note:
    """Lines to add to the text of a task, in the format of docs/guides/outcomes.md.

    `state` is a state of note_outcomes.lua, `at_ms` its time, or that of the next attempt. `head`
    begins the text of a task that is not known yet.
    """

    id: str
    state: str
    at_ms: int
    is_slow: bool
    head: str
    lines: str


class Known(NamedTuple):
    """The text of a task, and whether the last worker that had it is alive."""

    queue: str
    id: str
    text: bytes
    is_alive: bool


class Place(NamedTuple):
    """The place of a task in a list: the time of its state, or of its next attempt, and its id."""

    at_ms: int
    id: str


#: The place before all others.
TOP = Place(2**53, "")


class Listed(NamedTuple):
    """A task of a list, and its place there."""

    place: Place
    known: Known


class Kept(NamedTuple):
    """The minimum number of tasks that each table keeps, and for how long at least."""

    limit: int
    age_ms: int


class Outcomes:
    """The outcomes of the tasks in the queues of a store. A queue is one shard."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def note_calls(
        self,
        queue: str,
        notes: Sequence[Note],
        kept: Kept,
        worker: str = "",
        alive_ms: int = int(ALIVE_SECONDS * 1000),
    ) -> list[Call]:
        """The scripts that record notes and a worker as alive; `alive_ms` 0: the worker ends."""
        return [
            self._store.call(
                "note_outcomes",
                queue,
                limit=kept.limit,
                age_ms=kept.age_ms,
                worker=worker,
                alive_ms=alive_ms,
                entries=[
                    part
                    for note in chunk
                    for part in (
                        note.id,
                        f"{note.state} {note.at_ms} {'slow' if note.is_slow else ''}\n"
                        f"{note.head}{note.lines}",
                    )
                ],
            )
            for chunk in (chunks(notes, NOTES_LIMIT) if notes else [()])
        ]

    def get(self, queues: Sequence[str], id: str) -> list[Known]:
        """The records of one task in each of these queues, read in one go."""
        return self.get_many({queue: [id] for queue in queues})

    def get_many(self, ids: Mapping[str, Sequence[str]]) -> list[Known]:
        """The records of some tasks in each queue, read in one go."""
        return self.got(ids, self._store.all_of(self.get_calls(ids)))

    def get_calls(self, ids: Mapping[str, Sequence[str]]) -> list[Call]:
        """The scripts that read the records of some tasks in each queue."""
        return [self._store.call("outcomes", queue, ids=names) for queue, names in ids.items()]

    def got(self, queues: Iterable[str], answers: Sequence[Any]) -> list[Known]:
        """Read the answers of `get_calls`."""
        return [
            each
            for queue, answer in zip(queues, answers, strict=True)
            for each in _known(queue, answer)
        ]

    def are_recorded(self, queue: str) -> bool:
        """Whether workers have recently recorded any outcome."""
        return bool(self._store.run("EXISTS", self._store.keys(queue).outcomes + "used"))

    def counts(self, queues: Sequence[str], of: str) -> dict[str, int]:
        """How many tasks one of `LISTS` has in each of these queues, asked in one go.

        An upper bound, because only the text of a task shows that its state has changed since.
        """
        keys = [self._store.keys(queue).outcomes + LISTS[of] for queue in queues]
        found = without_errors(self._store.run.many([("ZCARD", key) for key in keys]))
        return dict(zip(queues, found, strict=True))

    def listed(self, queue: str, of: str, begin: Place = TOP) -> Iterator[Listed]:
        """All that one of `LISTS` has now, the latest first, from a place on.

        The places are read at once, some 2,000 at most: others may leave the list meanwhile.
        """
        key = self._store.keys(queue).outcomes + LISTS[of]
        found = scored(self._store.run("ZREVRANGE", key, 0, -1, "WITHSCORES"))
        places = [Place(int(float(at)), id.decode(errors="surrogateescape")) for id, at in found]
        wanted = {each.id: each for each in places if _order(each) <= _order(begin)}
        for ids in chunks([*wanted], PAGE_SIZE):
            for each in _known(queue, self._store.ask("outcomes", queue, ids=ids)):
                yield Listed(wanted[each.id], each)


def _order(place: Place) -> tuple[int, bytes]:
    return place.at_ms, place.id.encode(errors="surrogateescape")


def _known(queue: str, answer: Sequence[Any]) -> list[Known]:
    found = zip(answer[::3], answer[1::3], answer[2::3], strict=True)
    return [
        Known(queue, id.decode(errors="surrogateescape"), text, bool(alive))
        for id, text, alive in found
    ]
