"""Moves waiting tasks and dead letters to another queue."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from time import time
from typing import Any

from kombu_delayed.errors import AlreadyDelayed
from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.store.shards import queue_of

from ...app.queues import Queues
from ...errors import QueryError
from ...tasks.dead_task import DeadTask
from ...tasks.task_info import TaskInfo
from ..ready import ReadyTask, amend

#: A task that is being moved stays out of the reach of workers for so long.
HOLD_MS = 600_000

#: What a message has from the queue that it leaves.
OWN = ("due_ms", "wait", "ticket")


class Redirect:
    """Sends tasks to another queue of the broker, and then drops them where they were.

    No worker gets a task meanwhile: where it was, it is delayed. If the process is killed in
    between, the task stays there, or is in both queues and runs twice. Its due time and its
    priority stay, and retries stay in the new queue. Raises QueryError for an unknown queue.
    """

    def __init__(self, queues: Queues, to_queue: str) -> None:
        if not to_queue:
            raise QueryError("to_queue is empty: name the queue to move tasks to")
        queues.check_queue(to_queue)
        self._queues, self._to = queues, to_queue
        #: That a task leaves its queue is no event of its own: it is not cancelled.
        self._quiet = copy(queues.store)
        self._quiet.event_limit = 0

    def delayed(self, shard: str, infos: Sequence[TaskInfo]) -> int:
        """Move delayed tasks of one shard; returns how many were moved."""
        if queue_of(shard) == self._to:
            return 0
        hold_ms = _hold_ms()
        moves = [Move(each.member, str(max(each.due_ms or 0, hold_ms))) for each in infos]
        counts = self._backlog(shard).reschedule(moves, members=True)
        held = [info for info, count in zip(infos, counts, strict=True) if count]
        return self._send(shard, [(info, info) for info in held])

    def ready(self, tasks: Sequence[ReadyTask]) -> int:
        """Move ready tasks of one page; returns how many were moved."""
        if not tasks or queue_of(shard := tasks[0].shard) == self._to:
            return 0
        hold_ms, held = _hold_ms(), []
        for task in tasks:
            if not amend(task, lambda payload: None, due_ms=hold_ms):
                continue
            found = self._backlog(shard).get(task.info.id)
            member = next((each.member for each in found if each.kept.due_ms == hold_ms), None)
            if member is not None:
                held.append((task.info, replace(task.info, member=member, due_ms=0)))
        return self._send(shard, held)

    def dead(self, shard: str, tasks: Sequence[DeadTask]) -> int:
        """Replay dead letters of one shard in the other queue; returns how many."""
        sent = [each.letter.id for each in tasks if each.info.payload and self._put(each.info)]
        return self._queues.store.dead.purge(shard, sent)

    def _backlog(self, shard: str) -> Backlog:
        return Backlog(self._quiet, shard)

    def _send(self, shard: str, held: Sequence[tuple[TaskInfo, TaskInfo]]) -> int:
        """Send each task, and drop what is held of it; what could not be sent is let go again."""
        sent: list[TaskInfo] = []
        try:
            sent += (there for info, there in held if self._put(info))
        finally:
            self._let_go(shard, [there for _, there in held if there not in sent])
            self._backlog(shard).cancel([each.member for each in sent], members=True)
        return len(sent)

    def _let_go(self, shard: str, kept: Iterable[TaskInfo]) -> None:
        moves = [Move(each.member, str(each.due_ms or 0)) for each in kept]
        if moves:
            self._backlog(shard).reschedule(moves, members=True)

    def _put(self, info: TaskInfo) -> bool:
        """False: the other queue has a unique task like this one already."""
        try:
            self._queues.connection.default_channel._put(self._to, self._payload(info))
        except AlreadyDelayed:
            return False
        return True

    def _payload(self, info: TaskInfo) -> dict[str, Any]:
        payload: dict[str, Any] = json.loads(info.message)
        for name in OWN:
            payload.pop(name, None)
        if info.state == "dead":
            payload.pop("deliveries", None)
        place = {"exchange": "", "routing_key": self._to}
        properties = payload.setdefault("properties", {})
        properties["delivery_info"] = {**(properties.get("delivery_info") or {}), **place}
        headers = payload.setdefault("headers", {})
        if info.due_ms is not None and "x-delay" in headers:  # from when it was sent on
            headers["x-delay"] = max(info.due_ms - int(time() * 1000), 0)
        return payload


def _hold_ms() -> int:
    return int(time() * 1000) + HOLD_MS
