"""Records the outcomes of tasks: a worker's hooks note them, and a thread writes them to Redis."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from celery import Celery
from celery.utils.log import get_logger
from celery.utils.serialization import UnpickleableExceptionWrapper

from kombu_delayed.message.clock import now_ms
from kombu_delayed.message.envelope import escaped
from kombu_delayed.store.calls import instrumentation
from kombu_delayed.store.outcomes.records import ALIVE_SECONDS, BEAT_SECONDS, Note, Outcomes
from kombu_delayed.store.outcomes.tallies import Tallies

from ..errors import BROKER_FAILS
from ..tasks.failures import TRACEBACK_LENGTH, text_of
from ..tasks.history import NESTING, Family, head_of, line_of, tenant_text
from ..tasks.times import ms_until
from .broker import Broker
from .outcome_options import OutcomeOptions

logger = get_logger(__name__)

#: Maximum length of a recorded error's text, and of the arguments of a failed task.
MESSAGE_LENGTH, ARGUMENTS_LENGTH = 300, 200

#: How long a worker that ends waits for Redis to take the remaining events.
STOP_SECONDS = 2.0

#: How many tasks are written at once; other threads get the interpreter in between.
BATCH = 500

#: Maximum length of the recorded ids of related tasks.
ID_LENGTH = 100

ALIVE_MS = int(ALIVE_SECONDS * 1000)

#: A cache of the first lines of records.
_head = lru_cache(1_000)(head_of)


@dataclass(slots=True, eq=False)
class Queue:
    """A queue, which is one shard: its tasks, and the notes for it."""

    name: str
    #: The notes that Redis has not taken yet.
    notes: list[Note] = field(default_factory=list)
    #: The ids of the tasks that have not ended.
    live: set[str] = field(default_factory=set)
    tallies: Tallies = field(default_factory=Tallies)
    #: When this worker was last reported as alive, by the monotonic clock; None: never.
    beat_at: float | None = None
    #: Whether Redis did not take the last notes.
    is_failing: bool = False


@dataclass(slots=True, eq=False)
class Run:
    """A task in a worker, from its receipt to its end: its facts, and how many are written.

    Hooks set a fact and then check `is_seen`; the thread sets `is_seen` and then reads the facts.
    So a fact that one of them misses is seen by the other. No time is before an earlier one, even
    if the clock was set back: a history is read in the order of its times.
    """

    queue: Queue
    id: str
    task: str
    tenant: str | None
    retries: int
    family: Family
    received_at: float
    started_at: float = 0.0
    ended_at: float = 0.0
    pid: int = 0
    is_late: bool = False
    #: When it was due, or its queue was resumed since; None if it was not delayed.
    due_ms: int | None = None
    state: str = ""
    rest: Any = None
    is_seen: bool = False
    #: The time limit that it exceeded in a pool that cannot end it; 0 if it did not.
    limit_seconds: float = 0.0
    #: How many of its lines are written: received, started, ended (and an exceeded limit).
    written: int = 0


class Recorder:
    """Records the tasks of one worker. Its hooks only append; they never raise or block.

    Events that Redis does not take wait in a bounded buffer; `dropped` counts those without room.
    """

    def __init__(self, app: Celery, options: OutcomeOptions, hostname: str) -> None:
        self.options = options
        #: The name of the worker in Redis. After a restart under the same name it is another one.
        name = json.dumps(hostname.replace('"', ""))[1:-1]
        self.worker = f"{name}:{os.getpid()}:{secrets.token_hex(2)}"
        self.dropped = 0
        self._broker = Broker(app)
        self._runs: deque[Run] = deque()
        self._ending = threading.Event()
        self._queues: dict[str, Queue] = {}
        self._reported = 0
        self._thread = threading.Thread(target=self._run, name="delayed-outcomes", daemon=True)

    # Called by hooks, in any thread.

    def received(self, request: Any, shard: str) -> Run | None:
        """Note that the worker has received a task. Returns None if the buffer is full."""
        headers = request._request_dict
        retries = _number(headers, "retries")
        retries += _number(headers, "replaced_task_nesting") * NESTING
        tenant, id, name = tenant_text(headers.get("tenant")), str(request.id), str(request.name)
        if not (id.isascii() and name.isascii()):  # text that is not UTF-8 blocks all other writes
            id, name = escaped(id), escaped(name)
        if (queue := self._queues.get(shard)) is None:
            queue = self._queues.setdefault(shard, Queue(shard))
        run = Run(queue, id, name, tenant, retries, _family(headers), time.time())
        delivered = getattr(getattr(request, "message", None), "headers", None)
        if (due_ms := getattr(delivered, "due_ms", None)) is not None:
            run.due_ms = max(due_ms, getattr(delivered, "resumed_ms", 0))
        return run if self._has_room(run) else None

    def started(self, run: Run, pid: int, is_late: bool) -> None:
        """Note that a pool has started it. `is_late`: it is acknowledged when it has ended."""
        run.pid, run.is_late = pid, is_late
        run.started_at = max(time.time(), run.received_at)
        if run.is_seen:
            self._has_room(run)

    def ended(self, run: Run, state: str, rest: Any) -> None:
        """Note its end: "+" with its run time in seconds, or "-", "~", "x" or "b" with facts."""
        run.rest, run.state = rest, state
        run.ended_at = max(time.time(), run.started_at, run.received_at)
        if run.is_seen:
            self._has_room(run)

    def returned(self, run: Run) -> None:
        """Note that it went back to its queue before it started. Safe from any thread."""
        if not run.ended_at:
            self.ended(run, "b", {})

    def _has_room(self, run: Run) -> bool:
        if len(self._runs) >= self.options.buffer:
            self.dropped += 1
            return False
        self._runs.append(run)
        return True

    def failed(self, run: Run, error: Any, traceback: Any, **facts: Any) -> None:
        """Note that it failed with this error."""
        found = {**_said(error), **facts}
        if traceback:
            found["traceback"] = str(traceback)[-TRACEBACK_LENGTH:]
        self.ended(run, "-", found)

    def retrying(self, run: Run, error: Any, traceback: Any, **facts: Any) -> None:
        """Note that it will be retried, because of an error or at its own request."""
        cause = error.exc
        found = {"next_ms": now_ms() + ms_until(error.when), **facts}
        if cause is not None:
            found |= _said(cause)
            found["traceback"] = str(traceback or "")[-TRACEBACK_LENGTH:]
        self.ended(run, "~", found)

    # The thread.

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write the remaining events, if Redis takes them soon."""
        self._ending.set()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._ending.wait(self.options.interval_seconds):
            self.step()
        self.step(ends=True)
        self._broker.close()

    def step(self, ends: bool = False) -> None:
        """Write new events, and report that this worker is alive, or that it ends."""
        try:
            while True:
                self._gather()
                self._write()
                if not self._runs:
                    break
            self._beat(ends)
        except Exception:  # no error may stop the worker or its tasks
            logger.exception("Outcomes of tasks were not recorded")
            for queue in [*self._queues.values()]:
                queue.notes = []
        if self.dropped > self._reported and not self._is_failing():
            count, self._reported = self.dropped - self._reported, self.dropped
            if (meter := instrumentation.current) is not None:
                meter.outcomes_dropped(count)
            logger.warning("%d events of tasks were not recorded: the buffer was full", count)

    def _gather(self) -> None:
        """Turn events into notes: the events of a run since its last note become one note."""
        limit = self.options.buffer
        for _ in range(min(len(self._runs), BATCH)):
            run = self._runs.popleft()
            run.is_seen = True
            queue = run.queue
            if run.ended_at:
                queue.live.discard(run.id)
            else:
                if len(queue.live) > limit:  # the ends of some had no room
                    queue.live.clear()
                queue.live.add(run.id)
            if len(queue.notes) >= limit:
                self.dropped += 1
                continue
            before = run.written
            if (note := self._noted(run)) is not None:
                queue.notes.append(note)
            self._count(run, before)

    def _count(self, run: Run, before: int) -> None:
        """Add its events in the last note to the tallies of its queue."""
        tallies = run.queue.tallies
        if run.due_ms is not None and run.started_at and before < 2 <= run.written:
            tallies.began(run.task, run.started_at, run.started_at * 1000 - run.due_ms)
        if before < 3 == run.written and run.state != "b":
            rest = run.rest
            run_ms = rest * 1000 if run.state == "+" else rest.get("run_ms")
            tallies.ended(run.task, run.ended_at, run.state, run_ms)

    def _noted(self, run: Run) -> Note | None:
        """A note of its events since the last note, or None if there are none."""
        before, retries, worker = run.written, run.retries, self.worker
        # Once: what happens from here on is in the next note.
        run.written = 3 if run.ended_at else 2 if run.started_at else 1
        at_ms, lines, state, is_slow = int(run.received_at * 1000), "", "r", False
        if not before:
            lines = f'["r",{at_ms},{retries},"{worker}"]\n'
        if run.written > 1 and run.started_at:
            state, at_ms = "s", int(run.started_at * 1000)
            if before < 2:
                is_late = "1" if run.is_late else "0"
                lines += f'["s",{at_ms},{retries},"{worker}",{run.pid},{is_late}]\n'
        if run.written == 3:
            state, at_ms, rest = run.state, int(run.ended_at * 1000), run.rest
            if before < 3 and run.limit_seconds:
                lines += _overran(run)
            if state == "+":
                is_slow = rest >= self.options.slow_seconds
                last = f'["+",{at_ms},{retries},{int(rest * 1000)}]\n'
            else:
                is_slow = (rest.get("run_ms") or 0) >= self.options.slow_seconds * 1000
                last = line_of([state, at_ms, retries, rest])
                at_ms = rest.get("next_ms", at_ms)
            if before < 3:
                lines += last
        is_slow = is_slow or run.limit_seconds > 0
        if not lines:
            return None
        known = run.task, run.tenant
        head = head_of(*known, run.family) if run.family else _head(*known)
        return Note(run.id, state, at_ms, is_slow, head, lines)

    def _write(self) -> None:
        """Write the notes. A queue whose node is down keeps its notes; others are written."""
        for queue in [*self._queues.values()]:
            if queue.notes and self._send(queue, queue.notes):
                queue.notes = []

    def _beat(self, ends: bool) -> None:
        now = time.monotonic()
        for queue in [*self._queues.values()]:
            last = queue.beat_at
            if ends and last is not None:
                self._send(queue, [], 0)
            elif not ends and queue.live and (last is None or now - last >= BEAT_SECONDS):
                self._send(queue, [])

    def _send(self, queue: Queue, notes: list[Note], alive_ms: int = ALIVE_MS) -> bool:
        try:
            store = self._broker.store
            calls = Outcomes(store).note_calls(
                queue.name, notes, self.options.kept, self.worker, alive_ms
            )
            store.all_of([*calls, *queue.tallies.calls(store, queue.name, self.worker)])
            queue.tallies.were_written()
        except BROKER_FAILS as error:
            if not self._is_failing():
                logger.warning("Outcomes of tasks are not recorded for now: %s", error)
            queue.is_failing = True
            return False
        queue.beat_at = time.monotonic()
        if queue.is_failing and (notes or not queue.notes):
            queue.is_failing = False
            if not self._is_failing():
                logger.info("Outcomes of tasks are recorded again")
        return True

    def _is_failing(self) -> bool:
        return any(queue.is_failing for queue in [*self._queues.values()])


def _said(error: Any) -> dict[str, Any]:
    if isinstance(error, UnpickleableExceptionWrapper):  # shown as if it could be pickled
        text = text_of(Exception(*error.exc_args))[:MESSAGE_LENGTH]
        return {"error": error.exc_cls_name, "message": text}
    return {"error": type(error).__name__, "message": text_of(error)[:MESSAGE_LENGTH]}


def _overran(run: Run) -> str:
    """The line of a task that was not ended at its time limit, with the time of that limit."""
    limit_ms = int(run.limit_seconds * 1000)
    at_ms = int(min(run.started_at + run.limit_seconds, run.ended_at) * 1000)
    return f'["o",{at_ms},{run.retries},{json.dumps({"limit_ms": limit_ms})}]\n'


def _number(headers: Any, name: str) -> int:
    number = headers.get(name)
    return number if type(number) is int else 0


def _family(headers: Any) -> Family:
    """The ids of a task's root, parent and group; empty if it has neither parent nor group."""
    parent, group = headers.get("parent_id"), headers.get("group")
    if parent is None and group is None:
        return ()
    found = (headers.get("root_id"), parent, group)
    return tuple(None if each is None else str(each)[:ID_LENGTH] for each in found)


#: The recorder of this process's worker, or None if nothing is recorded.
current: Recorder | None = None
