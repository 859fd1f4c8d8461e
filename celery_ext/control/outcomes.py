"""Looks up one task by its id in any state, or lists the tasks with a recorded outcome."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

from celery.utils.log import get_logger

from kombu_delayed.inspection.lookup import (
    Found,
    kept_calls,
    kept_in,
    lookup_by_reading,
)
from kombu_delayed.inspection.ready.index import MOST
from kombu_delayed.store.calls.caller import chunks
from kombu_delayed.store.outcomes.records import LISTS, Note, Outcomes

from ..app.broker import Broker
from ..app.outcome_options import OutcomeOptions
from ..app.queues import Queues, despite_nodes_down
from ..app.settings import suggestion
from ..errors import BROKER_FAILS, QueryError
from ..tasks.history import TaskHistory, head_of, tenant_text
from ..tasks.progress import Progress
from ..tasks.query import ids_of
from ..tasks.task_info import TaskInfo
from ..tasks.times import Length, to_length

logger = get_logger(__name__)

#: How many shards are asked for tasks at once.
ASKED = 100

#: A shard, and the id of a task in it.
Place = tuple[str, str]

#: The longest list of ready tasks that is read for a task that should not be ready.
SHORT = 10_000

#: The states that are listed as failed.
FAILED = ("failed", "lost")


@despite_nodes_down
def look_up(queues: Queues, id: str, queue: str | None, progress: Progress) -> TaskInfo | None:
    """Find a task: by its waiting message, or else by the records of workers. None if unknown."""
    found, passed = None, list[str]()

    def is_there(shard: str) -> bool:
        return found is not None and shard == found.shard

    for names in _places(queues, queue):
        shards = _shards(queues, names, id)
        recorded, messages = recorded_and_kept(queues, {shard: [id] for shard in shards})
        found = newest([*([found] if found else []), *recorded.values()])
        # A retry may be in another queue, but usually the message is where the record is.
        shards.sort(key=is_there, reverse=True)
        kept = [each for shard in shards for each in messages.get((shard, id), ())]
        if info := (TaskInfo.of(kept[0]) if kept else _ready(queues, shards, id, found)):
            return info.with_history(found) if found else info
        if found is not None and is_certain(found):
            return TaskInfo.recorded(found)
        passed += shards
    passed.sort(key=is_there, reverse=True)
    return _by_reading(queues, passed, id, progress, found)


def recorded_and_kept(
    queues: Queues, ids: Mapping[str, Sequence[str]]
) -> tuple[dict[Place, TaskHistory], dict[Place, list[Found]]]:
    """Read the records of tasks and their delayed and dead messages in one go.

    `ids` maps each shard to the ids to look for there.
    """
    store, histories, kept = queues.store, dict[Place, TaskHistory](), dict[Place, list[Found]]()
    outcomes = Outcomes(store)
    for chunk in chunks([*ids.items()], ASKED):
        part = dict(chunk)
        answers = store.all_of([*outcomes.get_calls(part), *kept_calls(store, part)])
        for known in outcomes.got(part, answers[: len(part)]):
            histories[known.queue, known.id] = TaskHistory.of(known)
        kept |= kept_in(store, part, answers[len(part) :])
    return histories, kept


def is_certain(history: TaskHistory | None) -> bool:
    """Returns whether a record says for certain where a task without a waiting message is.

    Long lists of ready tasks are then not read for it: only a reused id would be in them.
    """
    if history is None or history.state in ("rejected", "replaced"):
        return False  # it may have been put back, or replayed
    if history.last is not None and history.last.event in ("lost", "timed out"):
        started = [step for step in history.steps if step.event == "started"]
        if started and started[-1].is_acked_late:
            return False  # Celery may have put it back
    is_held = history.state in ("running", "received")
    return is_held or history.is_over


def _ready(
    queues: Queues, shards: Sequence[str], id: str, history: TaskHistory | None
) -> TaskInfo | None:
    most = SHORT if is_certain(history) else MOST
    found, _ = queues.ready_index.find(queues.store, shards, id, most)
    return TaskInfo.of(found[0].found()) if found else None


def _by_reading(
    queues: Queues,
    shards: Iterable[str],
    id: str,
    progress: Progress,
    history: TaskHistory | None,
) -> TaskInfo | None:
    for shard in shards:
        for found in lookup_by_reading(queues.store, shard, id, progress):
            info = TaskInfo.of(found)
            return info.with_history(history) if history else info
    return TaskInfo.recorded(history) if history else None


def _places(queues: Queues, queue: str | None) -> Iterator[Sequence[str]]:
    """The given queue; or the app's queues, and then the others, found by scanning all keys."""
    look_at = queues.store.shards.look_at_all
    own = list(queues.app.amqp.queues) if queue is None else [queue]
    look_at(own)
    yield own
    if queue is None:
        others = [name for name in queues.queues() if name not in own]
        look_at(others)
        yield others


def _shards(queues: Queues, names: Iterable[str], id: str) -> list[str]:
    ids_of([id])
    nearest = queues.store.shards.nearest
    return [shard for name in names for shard in nearest(name, id)]


def recorded_in(queues: Queues, shards: Sequence[str], id: str) -> list[TaskHistory]:
    """The records of a task in each of these shards, read in one go."""
    return [TaskHistory.of(known) for known in Outcomes(queues.store).get(shards, id)]


@despite_nodes_down
def history_of(queues: Queues, id: str, queue: str | None) -> TaskHistory | None:
    """The record of a task in the app's queues, and in all others if it may have moved."""
    found = list[TaskHistory]()
    for names in _places(queues, queue):
        found += recorded_in(queues, _shards(queues, names, id), id)
        if is_certain(newest(found)):
            break
    return newest(found)


def certain_ids(queues: Queues, names: Sequence[str], ids: Iterable[str]) -> set[str]:
    """The ids whose records in some queues say for certain where their tasks are."""
    outcomes, found = Outcomes(queues.store), dict[str, list[TaskHistory]]()
    for part in chunks([*ids], ASKED):
        shards = dict[str, list[str]]()
        for id in part:
            for shard in _shards(queues, names, id):
                shards.setdefault(shard, []).append(id)
        for some in chunks([*shards.items()], ASKED):
            for known in outcomes.get_many(dict(some)):
                found.setdefault(known.id, []).append(TaskHistory.of(known))
    return {id for id, histories in found.items() if is_certain(newest(histories))}


def newest(found: Sequence[TaskHistory]) -> TaskHistory | None:
    """Merge the records of several queues into one, in the queue of its last step."""
    if not found:
        return None
    ordered = sorted(found, key=lambda each: each.last.at_ms if each.last else 0)
    last = ordered[-1]
    return last if len(ordered) == 1 else last.after(ordered[:-1])


@dataclass(frozen=True)
class TaskFilter:
    """Selects tasks of a list by patterns and run times. None matches any task."""

    task: str | None = None
    error: str | None = None
    worker: str | None = None
    longer_than: Length | None = None
    shorter_than: Length | None = None

    @cached_property
    def _run_times(self) -> tuple[timedelta | None, timedelta | None]:
        longer = to_length("longer_than", self.longer_than)
        return longer, to_length("shorter_than", self.shorter_than)

    def __post_init__(self) -> None:
        """Raises QueryError for an invalid length of time."""
        _ = self._run_times

    def matches(self, history: TaskHistory) -> bool:
        failure, (least, most) = history.failure, self._run_times
        seconds = None if (least, most) == (None, None) else history.run_seconds
        ran = None if seconds is None else timedelta(seconds=seconds)
        errors = (failure.error, failure.said) if failure else ("",)
        return (
            (self.task is None or fnmatchcase(history.task, self.task))
            and (self.worker is None or fnmatchcase(history.worker, self.worker))
            and (self.error is None or any(fnmatchcase(each, self.error) for each in errors))
            and (least is None or (ran is not None and ran > least))
            and (most is None or (ran is not None and ran < most))
        )


def recorded(
    queues: Queues, of: str, queue: str | None, chosen: TaskFilter | None = None
) -> Iterator[TaskHistory]:
    """The tasks of a list, queue by queue, as in `Delayed.recorded`."""
    return recorded_of(queues, of, lambda: queues.shards(queue), chosen)


def recorded_of(
    queues: Queues, of: str, shards: Callable[[], Sequence[str]], chosen: TaskFilter | None = None
) -> Iterator[TaskHistory]:
    """Like `recorded`, for some shards."""
    if of not in LISTS:
        raise QueryError(f"no tasks are listed as {of!r}{suggestion(of, LISTS, 'there are')}")
    chosen = chosen or TaskFilter()
    return filter(
        chosen.matches, (each for shard in shards() for each in listed(queues, of, shard))
    )


def listed(queues: Queues, of: str, shard: str) -> Iterator[TaskHistory]:
    """The tasks of a list in one shard, the latest first."""
    yield from (each for each in _all(queues, of, shard) if is_listed(each, of))
    if of == "failed":  # those whose worker is gone: nobody has recorded that they failed
        running = _all(queues, "running", shard)
        yield from (each for each in running if each.state == "lost")


def _all(queues: Queues, of: str, shard: str) -> Iterator[TaskHistory]:
    for each in Outcomes(queues.store).listed(shard, of):
        yield TaskHistory.of(each.known)


def is_listed(history: TaskHistory, of: str) -> bool:
    """Returns whether a task still belongs to a list, which may lag behind its state."""
    if of == "failed":
        return history.state in FAILED
    return of == "slow" or history.state == of


class Gone(NamedTuple):
    """A task that will not run: its shard, id, name and tenant; `task` is empty if unknown."""

    shard: str
    id: str
    task: str = ""
    tenant: str | None = None


def write_now(
    broker: Broker, options: OutcomeOptions | None, state: str, of: Iterable[Gone]
) -> None:
    """Record what this process has just done with tasks. It need not be a worker.

    `state` is why they do not run: "cancelled". If Redis does not take it, no error is raised.
    """
    if options is None:
        return
    at_ms, notes = int(time.time() * 1000), dict[str, list[Note]]()
    for shard, id, task, tenant in of:
        line = json.dumps(["x", at_ms, 0, {"why": state}]) + "\n"
        head = head_of(task, tenant_text(tenant))
        notes.setdefault(shard, []).append(Note(id, "x", at_ms, False, head, line))
    if not notes:
        return
    try:
        outcomes = Outcomes(broker.store)
        broker.store.all_of(
            call
            for shard, each in notes.items()
            for call in outcomes.note_calls(shard, each, options.kept)
        )
    except BROKER_FAILS as error:
        count = sum(map(len, notes.values()))
        logger.warning("%d tasks are %s, but that is not recorded: %s", count, state, error)
