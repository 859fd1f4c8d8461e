"""Cancels and reschedules tasks, and notifies result backends and receivers of signals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from typing import Any

from kombu_delayed.inspection.backlog import Move
from kombu_delayed.inspection.copies import Copies
from kombu_delayed.inspection.gate_usage import server_ms
from kombu_delayed.store.calls.shards import queue_of

from ...app import signals
from ...app.outcome_options import OutcomeOptions
from ...app.queues import Queues, despite_nodes_down
from ...tasks.task_info import TaskInfo
from ...tasks.times import LATEST_MS, from_ms
from ..outcomes import Gone, write_now
from .ready import ReadyTask, amend, ready_tasks

#: A due time for the broker, and for the header of the task; "" leaves the header unchanged.
Due = tuple[str, str]

NOW: Due = "+0", ""


def due_at(due_ms: int) -> Due:
    """A time in ms since the epoch, or the nearest one that a datetime can represent."""
    due_ms = min(max(due_ms, 0), LATEST_MS)
    return str(due_ms), from_ms(due_ms).isoformat()


class Moves:
    """Moves delayed and ready tasks: by id in any shard, or as they were found in one shard."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def cancel_by_id(self, ids: list[str], queue: str | None) -> set[str]:
        """Drop the delayed and the ready tasks with these ids; returns those that were there."""
        gone: set[str] = set()

        @despite_nodes_down
        def cancel(queues: Queues) -> bool:
            moves = Moves(queues)
            gone.update(moves.cancel_ids([id for id in ids if id not in gone], queue))
            rest = [id for id in ids if id not in gone]
            for task in ready_tasks(queues, rest, queue):
                gone.update(info.id for info in moves.cancel_ready([task]))
            return len(gone) == len(ids)

        cancel(self._queues)
        return gone

    def cancel_ids(self, ids: list[str], queue: str | None) -> set[str]:
        """Drop the delayed tasks with these ids; returns the ids of those that were there."""
        gone: set[str] = set()
        for shards in self._queues.where(queue, ids, gone):
            copies = Copies(self._queues.store, shards)
            if not self._queues.reports_cancelled():
                found = [*compress(ids, copies.cancel(ids))]
                gone.update(found)
                nearest = self._queues.store.shards.nearest
                self._record(Gone(nearest(queue_of(shards[0]), id)[0], id) for id in found)
                continue
            infos = [TaskInfo.waiting(*each) for each in copies.take(ids)]
            for info in infos:
                gone.add(info.id)
                self._queues.was_cancelled(info)
            nearest = self._queues.store.shards.nearest
            self._record(_gone(nearest(each.queue, each.id)[0], each) for each in infos)
        return gone

    def cancel_ready(self, tasks: Sequence[ReadyTask]) -> list[TaskInfo]:
        """Drop ready tasks of one page; returns those that were still ready."""
        if not tasks:
            return []
        shard, lists, *_ = tasks[0]
        dropped = compress(tasks, lists.withdraw([each.ready for each in tasks]))
        infos = [each.info for each in dropped]
        for info in infos:
            self._queues.was_cancelled(info)
        self._record(_gone(shard, info) for info in infos)
        return infos

    def postpone(self, task: ReadyTask, due: Due, now_ms: int | None = None) -> bool:
        """Give a ready task a due time. With one that has passed it is delivered next.

        `now_ms` is the time by the server's clock, if the caller knows it.
        """
        if due != NOW and now_ms is None:
            now_ms = server_ms(self._queues.store, task.shard)
        due_ms = None if due == NOW or int(due[0]) <= (now_ms or 0) else int(due[0])

        def rewrite(payload: dict[str, Any]) -> None:
            if due_ms is not None and isinstance(payload["headers"].get("eta"), str):
                payload["headers"]["eta"] = due[1]

        if not amend(task, rewrite, due_ms=due_ms, is_first=due_ms is None):
            return False
        self._was_rescheduled(task.info.id, due)
        return True

    def postpone_all(self, tasks: Sequence[ReadyTask], dues: Iterable[Due]) -> int:
        """Like `postpone`, for the ready tasks of one page; returns how many were still ready."""
        if not tasks:
            return 0
        now_ms = repeat(server_ms(self._queues.store, tasks[0].shard))
        # From the end, because a task that leaves lets those behind it move up.
        return sum(map(self.postpone, reversed(tasks), reversed([*dues]), now_ms))

    def _record(self, cancelled: Iterable[Gone]) -> None:
        """Record for `get` that they were cancelled, if the app records outcomes."""
        if getattr(self._queues.app, "delayed", None) is not None:
            options = OutcomeOptions.of(self._queues.app)
            write_now(self._queues, options, "cancelled", cancelled)

    def cancel(self, shard: str, infos: Sequence[TaskInfo]) -> list[TaskInfo]:
        """Drop delayed tasks of one shard; returns those that were there."""
        counts = self._queues.backlog(shard).cancel([info.member for info in infos], members=True)
        dropped = list(compress(infos, counts))
        for info in dropped:
            self._queues.was_cancelled(info)
        self._record(_gone(shard, info) for info in dropped)
        return dropped

    def reschedule_by_id(self, id: str, due: Due, queue: str | None) -> bool:
        """Give the task with this id another due time; True if it was delayed or ready."""
        search = despite_nodes_down(lambda queues: Moves(queues)._reschedule(id, due, queue))
        return search(self._queues)

    def _reschedule(self, id: str, due: Due, queue: str | None) -> bool:
        if self._reschedule_id(id, due, queue):
            return True
        tasks = ready_tasks(self._queues, [id], queue)
        return sum(self.postpone(each, due) for each in tasks) > 0

    def _reschedule_id(self, id: str, due: Due, queue: str | None) -> bool:
        moved: set[str] = set()
        for shards in self._queues.where(queue, [id], moved):
            if Copies(self._queues.store, shards).reschedule([Move(id, *due)])[0]:
                moved.add(id)
        if moved:
            self._was_rescheduled(id, due)
        return bool(moved)

    def reschedule(self, shard: str, infos: Sequence[TaskInfo], dues: Iterable[Due]) -> int:
        """Give delayed tasks of one shard other due times; returns how many were there."""
        moves = [Move(info.member, *due) for info, due in zip(infos, dues, strict=True)]
        counts = self._queues.backlog(shard).reschedule(moves, members=True)
        for info, move, count in zip(infos, moves, counts, strict=True):
            if count:
                self._was_rescheduled(info.id, (move.due, move.eta))
        return sum(counts)

    def run_now(self, shard: str, infos: Sequence[TaskInfo]) -> int:
        """Let delayed tasks of one shard run now; returns how many were there."""
        return self.reschedule(shard, infos, [NOW] * len(infos))

    def _was_rescheduled(self, id: str, due: Due) -> None:
        signals.task_rescheduled.send(sender=self._queues.app, task_id=id, eta=due[1] or None)


def _gone(shard: str, info: TaskInfo) -> Gone:
    return Gone(shard, info.id, info.task, info.tenant)
