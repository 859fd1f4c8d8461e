"""Moves waiting tasks and dead letters to another queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from time import monotonic
from typing import Any

from kombu.exceptions import OperationalError
from kombu.utils.functional import retry_over_time

from kombu_delayed.errors import AlreadyDelayed
from kombu_delayed.inspection.backlog import Backlog, Move, waiting_of
from kombu_delayed.inspection.expectations import ANSWER_HEADER
from kombu_delayed.inspection.gate_usage import server_ms
from kombu_delayed.message.envelope import Kept
from kombu_delayed.store.calls.caller import chunks
from kombu_delayed.store.calls.shards import queue_of

from ...app.queues import Queues, despite_nodes_down
from ...errors import BROKER_FAILS, QueryError
from ...tasks.body import payload_of
from ...tasks.dead_task import DeadTask
from ...tasks.task_info import TaskInfo
from .ready import ReadyTask, amend, ready_tasks
from .unbroken import unbroken

#: How long a task that is being moved is held back from workers, and how many are read at a time.
HOLD_MS, READ = 60_000, 50

#: How long sending and dropping a task are retried while the broker cannot be reached.
TRY_SECONDS = 20
INTERVALS = {"interval_start": 0.1, "interval_step": 0.2, "interval_max": 1}

#: The parts of a message that belong to the queue that it leaves.
OWN = ("wait", "ticket")


class Redirect:
    """Sends tasks to another queue of the broker, and drops each from its old queue.

    No worker gets a task meanwhile, because it is held as delayed in its old queue. If the process
    is killed, one task stays held there, at most a minute late, or is in both queues and runs
    twice. A first Ctrl-C waits until the tasks that were read are moved. A task keeps its due time
    and its priority, and retries stay in the new queue. A task that others change before it is held
    stays where it is, and so does an expectation. Raises QueryError for an unknown queue.
    """

    def __init__(self, queues: Queues, to_queue: str) -> None:
        if not to_queue:
            raise QueryError("to_queue is empty: name the queue to move tasks to")
        queues.check_queue(to_queue)
        self._queues, self._to = queues, to_queue
        #: Writes no events: a task that leaves its queue is not cancelled.
        self._quiet = copy(queues.store)
        self._quiet.event_limit = 0
        self._held_until_ms = 0

    def has(self, info: TaskInfo) -> bool:
        """Returns whether a task stays: it is in the other queue already, or an expectation."""
        return info.queue == self._to or _expects(info)

    def delayed(self, shard: str, infos: Sequence[TaskInfo]) -> int:
        """Move delayed tasks of one shard; returns how many were moved."""
        infos = [info for info in infos if not self.has(info)]
        return sum(self._move(shard, part) for part in chunks(infos, READ))

    @unbroken()
    def _move(self, shard: str, infos: Sequence[TaskInfo]) -> int:
        return sum(self._send(shard, each, each) for each in self._hold(shard, infos))

    def ready(self, tasks: Sequence[ReadyTask]) -> int:
        """Move ready tasks of one page, in the order in which they run; returns how many."""
        if not tasks or queue_of(tasks[0].shard) == self._to:
            return 0
        # From the end of the page, because a task that leaves lets those behind it move up.
        return sum(map(self._move_ready, chunks(tasks[::-1], READ)))

    @unbroken()
    def _move_ready(self, tasks: Sequence[ReadyTask]) -> int:
        return sum(self._send(tasks[0].shard, *each) for each in self._hold_ready(tasks))

    def by_id(self, id: str, queue: str | None) -> bool:
        """Move the delayed or ready tasks with an id. True if they are now in the other queue."""

        @despite_nodes_down
        def move(queues: Queues) -> bool:
            return (self if queues is self._queues else Redirect(queues, self._to))._id(id, queue)

        return move(self._queues)

    def _id(self, id: str, queue: str | None) -> bool:
        queues, count, found = self._queues, 0, set[str]()
        for shard in chain.from_iterable(queues.where(queue, [id], found)):
            infos = [TaskInfo.waiting(shard, each) for each in queues.backlog(shard).get(id)]
            if any(map(_expects, infos)):
                raise QueryError(f"{id!r} is an expectation: no answer finds it in another queue")
            if infos:
                found.add(id)
                count += queue_of(shard) == self._to or self.delayed(shard, infos)
        for task in [] if found else [*ready_tasks(queues, [id], queue)]:
            count += queue_of(task.shard) == self._to or self.ready([task])
        return count > 0

    def dead(self, shard: str, tasks: Sequence[DeadTask]) -> int:
        """Replay dead letters of one shard in the other queue; returns how many."""
        purge = self._queues.store.dead.purge
        return sum(
            purge(shard, [each.letter.id])
            for each in tasks
            if each.info.payload and self._put(each.info)
        )

    def _backlog(self, shard: str) -> Backlog:
        return Backlog(self._quiet, shard)

    def _clock(self, shard: str) -> Callable[[], int]:
        """The time until which a task is held from now on, by the clock of its server."""
        ahead_ms = server_ms(self._queues.store, shard) + HOLD_MS - int(monotonic() * 1000)

        def until_ms() -> int:
            self._held_until_ms = int(monotonic() * 1000) + ahead_ms
            return self._held_until_ms

        return until_ms

    # Each task is held just before it is sent: if others change it then, that is lost.

    def _hold(self, shard: str, infos: Sequence[TaskInfo]) -> Iterator[TaskInfo]:
        """Hold delayed tasks back from workers; yields those that have not changed since read."""
        store, backlog, until_ms = self._queues.store, self._backlog(shard), self._clock(shard)
        records = store.records(shard, [_name(each) for each in infos])
        for info, record in zip(infos, records, strict=True):
            waiting = None if record is None else waiting_of(store, shard, info.member, record)
            if waiting is not None and _is_same(info, kept := waiting.kept):
                # At least 1 ms later, so that a redirect that has read it, too, finds it changed.
                hold_ms = max(kept.due_ms + 1, until_ms())
                if backlog.revise(waiting, kept.step, kept.message, hold_ms):
                    yield info

    def _hold_ready(self, tasks: Sequence[ReadyTask]) -> Iterator[tuple[TaskInfo, TaskInfo]]:
        """Hold ready tasks back from workers; yields each as it was, and as it is held."""
        backlog, until_ms = self._backlog(tasks[0].shard), self._clock(tasks[0].shard)
        for task in tasks:
            hold_ms = until_ms()
            if not amend(task, lambda payload: None, due_ms=hold_ms):
                continue
            found = backlog.get(task.info.id)
            member = next((each.member for each in found if each.kept.due_ms == hold_ms), None)
            if member is not None:
                yield task.info, replace(task.info, member=member)

    def _send(self, shard: str, info: TaskInfo, held: TaskInfo) -> bool:
        """Send a task and drop the held one; if it could not be sent, it is let go again."""
        try:
            is_sent = self._put(info)
        except BaseException:
            with suppress(*BROKER_FAILS):  # the first error says more
                self._let_go(shard, held)
            raise
        (self._drop if is_sent else self._let_go)(shard, held)
        return is_sent

    def _drop(self, shard: str, held: TaskInfo) -> None:
        """Drop a held task that is already in the other queue, or it would run twice."""
        cancel = partial(self._backlog(shard).cancel, [held.member], members=True)
        try:
            retry_over_time(cancel, BROKER_FAILS, timeout=TRY_SECONDS, **INTERVALS)
        except BROKER_FAILS as error:
            raise OperationalError(
                f"task {held.id} is in queue {self._to!r} now, but could not be taken out of "
                f"{queue_of(shard)!r}: it runs a second time there in a minute, or when it is due, "
                f"unless you cancel it in that queue: {error}"
            ) from error

    def _let_go(self, shard: str, held: TaskInfo) -> None:
        due = "+0" if held.due_ms is None else str(held.due_ms)  # one that was ready may have none
        self._backlog(shard).reschedule([Move(held.member, due)], members=True)

    def _put(self, info: TaskInfo) -> bool:
        """Send a task. False if the other queue already has a unique task like this one."""
        payload = self._payload(info)
        due = ""  # now, regardless of its ETA: `due_ms` in the message tells a worker so
        if info.state not in ("ready", "dead"):
            payload.pop("due_ms", None)
            due = str(info.due_ms or 0)

        def put() -> None:
            channel = self._queues.connection.default_channel
            channel._put(self._to, deepcopy(payload), _due=due, _moves=True)

        try:
            if due and int(due) >= self._held_until_ms:
                # While it is delayed, sending it again is idempotent.
                retry_over_time(put, BROKER_FAILS, timeout=TRY_SECONDS, **INTERVALS)
            else:
                put()
        except AlreadyDelayed:
            return False
        except BROKER_FAILS as error:
            raise OperationalError(
                f"task {info.id} stays in queue {info.queue!r}, and may be in {self._to!r} as "
                f"well, because the broker failed when it was sent there: {error}"
            ) from error
        return True

    def _payload(self, info: TaskInfo) -> dict[str, Any]:
        payload = payload_of(info)
        for name in OWN:
            payload.pop(name, None)
        if info.state == "dead":  # it starts again, as after a replay in its own queue
            payload.pop("deliveries", None)
            headers = payload.get("headers")
            if isinstance(headers, dict) and "retries" in headers:
                headers["retries"] = 0
        place = {"exchange": "", "routing_key": self._to}
        properties = payload.setdefault("properties", {})
        properties["delivery_info"] = {**(properties.get("delivery_info") or {}), **place}
        return payload


def _expects(info: TaskInfo) -> bool:
    """Returns whether a task is an expectation without an answer."""
    return info.headers.get(ANSWER_HEADER, "") is None


def _is_same(info: TaskInfo, kept: Kept) -> bool:
    return (kept.due_ms, kept.message) == (info.due_ms, info.message)


def _name(info: TaskInfo) -> bytes:
    return info.member.encode(errors="surrogateescape")
