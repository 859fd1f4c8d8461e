"""What became of each task, as workers note it: by its id, for longer than its message is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..calls.caller import chunks, without_errors
from ..calls.scripts import Call
from ..store import Store

#: What a worker that has nothing to note says so often, and how long it counts as alive.
BEAT_SECONDS, ALIVE_SECONDS = 10.0, 30.0

#: The lists of tasks that are kept by time, and what each is called in Redis.
LISTS = {"failed": "failed-ids", "running": "running", "retrying": "retrying", "slow": "slow"}

#: So many tasks one call reads.
PAGE_SIZE = 100


class Note(NamedTuple):
    """Lines to add to what is known of a task. docs/guides/outcomes.md has their format.

    `state` is what note_outcomes.lua takes, `at_ms` its time, or that of the next attempt. `head`
    begins the text of a task that is not known yet.
    """

    id: str
    state: str
    at_ms: int
    is_slow: bool
    head: str
    lines: str


class Known(NamedTuple):
    """The text of a task, and whether the worker that had it last is alive."""

    queue: str
    id: str
    text: bytes
    is_alive: bool


class Kept(NamedTuple):
    """So many tasks are kept of each table, for so long, at the least."""

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
        """The scripts that note them, and say that a worker is alive; `alive_ms` 0: it ends."""
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
                        note.state,
                        note.at_ms,
                        int(note.is_slow),
                        note.head,
                        note.lines,
                    )
                ],
            )
            for chunk in (chunks(notes) if notes else [()])
        ]

    def get(self, queues: Sequence[str], id: str) -> list[Known]:
        """What is known of one task in each of these queues, read in one go."""
        return self.get_many({queue: [id] for queue in queues})

    def get_many(self, ids: Mapping[str, Sequence[str]]) -> list[Known]:
        """What is known of some tasks in each queue, read in one go."""
        return self.got(ids, self._store.all_of(self.get_calls(ids)))

    def get_calls(self, ids: Mapping[str, Sequence[str]]) -> list[Call]:
        """The scripts that read what is known of some tasks in each queue."""
        return [self._store.call("outcomes", queue, ids=names) for queue, names in ids.items()]

    def got(self, queues: Iterable[str], answers: Sequence[Any]) -> list[Known]:
        """What their answers say."""
        return [
            each
            for queue, answer in zip(queues, answers, strict=True)
            for each in _known(queue, answer)
        ]

    def are_recorded(self, queue: str) -> bool:
        """Whether workers have lately noted any."""
        return bool(self._store.run("EXISTS", self._store.keys(queue).outcomes + "used"))

    def counts(self, queues: Sequence[str], of: str) -> dict[str, int]:
        """How many tasks one of `LISTS` has in each of these queues, asked in one go.

        An upper bound: what became of some since is known from their texts only.
        """
        keys = [self._store.keys(queue).outcomes + LISTS[of] for queue in queues]
        found = without_errors(self._store.run.many([("ZCARD", key) for key in keys]))
        return dict(zip(queues, found, strict=True))

    def page(self, queue: str, of: str, start: int = 0) -> tuple[list[Known], bool]:
        """Part of one of `LISTS`, the latest first, and whether there is more."""
        count, *answer = self._store.ask(
            "outcomes_page", queue, list=LISTS[of], start=start, count=PAGE_SIZE
        )
        return _known(queue, answer), count == PAGE_SIZE


def _known(queue: str, answer: Sequence[Any]) -> list[Known]:
    found = zip(answer[::3], answer[1::3], answer[2::3], strict=True)
    return [
        Known(queue, id.decode(errors="surrogateescape"), text, bool(alive))
        for id, text, alive in found
    ]
