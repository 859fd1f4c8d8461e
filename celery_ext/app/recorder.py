"""Records what becomes of tasks: a worker's hooks note it, and a thread writes it to Redis."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from celery import Celery
from celery.utils.log import get_logger

from kombu_delayed.store.calls import instrumentation
from kombu_delayed.store.outcomes.records import ALIVE_SECONDS, BEAT_SECONDS, Note, Outcomes
from kombu_delayed.store.outcomes.tallies import Tallies

from ..errors import BROKER_FAILS
from ..tasks.failures import TRACEBACK_LENGTH, text_of
from ..tasks.history import NESTING, Family, head_of, line_of, tenant_text
from .broker import Broker
from .outcome_options import OutcomeOptions

logger = get_logger(__name__)

#: So much is kept of an error's text, and of the arguments of what has failed.
MESSAGE_LENGTH, ARGUMENTS_LENGTH = 300, 200

#: A worker that ends waits so long for Redis to take what it has to say.
STOP_SECONDS = 2.0

#: So many tasks are written in one go: others have the interpreter in between.
BATCH = 500

#: Of the ids of other tasks so much is kept.
ID_LENGTH = 100

ALIVE_MS = int(ALIVE_SECONDS * 1000)

#: So many first lines are remembered.
_head = lru_cache(1_000)(head_of)


@dataclass(slots=True, eq=False)
class Run:
    """A task in a worker, from its receipt to its end: what is known of it, and what is written.

    Hooks set a fact and then look at `is_seen`; the thread sets that and then reads the facts. So
    whatever the one has missed, the other has not.
    """

    queue: str
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
    #: When it was due, or its queue was resumed since; None: it was not delayed.
    due_ms: int | None = None
    state: str = ""
    rest: Any = None
    is_seen: bool = False
    #: The time limit that it ran over, in a pool that cannot end it; 0: it did not.
    limit_seconds: float = 0.0
    #: How many of its lines: received, started, ended (and of what it ran over).
    written: int = 0


@dataclass
class Unsent:
    """The notes of a queue that Redis has yet to take, by id and tenant, of so many events."""

    notes: dict[tuple[str, str | None], Note]
    events: int = 0


class Recorder:
    """What happens to tasks in one worker. Its hooks only append; they raise and wait for nothing.

    What Redis does not take waits in a bounded buffer; `dropped` counts what found no room.
    """

    def __init__(self, app: Celery, options: OutcomeOptions, hostname: str) -> None:
        self.options = options
        #: What the worker is called in Redis. A worker started again under its name is another.
        name = json.dumps(hostname)[1:-1].replace('"', "")
        self.worker = f"{name}:{os.getpid()}:{secrets.token_hex(2)}"
        self.dropped = 0
        self._broker = Broker(app)
        self._runs: deque[Run] = deque()
        self._ending = threading.Event()
        self._live: dict[str, set[str]] = {}
        self._beat_at: dict[str, float] = {}
        self._unsent: dict[str, Unsent] = {}
        self._tallies = defaultdict[str, Tallies](Tallies)
        self._told = 0
        #: The queues whose outcomes Redis does not take.
        self._failing: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="delayed-outcomes", daemon=True)

    # What hooks call, in whichever thread.

    def received(self, request: Any, shard: str) -> Run | None:
        """A worker has a task; None: there is no room to remember it."""
        headers = request._request_dict
        retries = _number(headers, "retries")
        retries += _number(headers, "replaced_task_nesting") * NESTING
        tenant, id = tenant_text(headers.get("tenant")), request.id
        if not id.isascii():  # what is no UTF-8 would keep all others from being written
            id = id.encode(errors="backslashreplace").decode()
        run = Run(shard, id, request.name, tenant, retries, _family(headers), time.time())
        told = getattr(getattr(request, "message", None), "headers", None)
        if (due_ms := getattr(told, "due_ms", None)) is not None:
            run.due_ms = max(due_ms, getattr(told, "resumed_ms", 0))
        return run if self._has_room(run) else None

    def started(self, run: Run, pid: int, is_late: bool) -> None:
        """A pool has begun it; `is_late`: it is acknowledged when it has ended."""
        run.pid, run.is_late = pid, is_late
        run.started_at = time.time()
        if run.is_seen:
            self._has_room(run)

    def ended(self, run: Run, state: str, rest: Any) -> None:
        """It has ended: "+" with the seconds that it took, or "-", "~", "x" or "b" with facts."""
        run.rest, run.state = rest, state
        run.ended_at = time.time()
        if run.is_seen:
            self._has_room(run)

    def returned(self, run: Run) -> None:
        """It has gone back to its queue before it began; from any thread."""
        if not run.ended_at:
            self.ended(run, "b", {})

    def _has_room(self, run: Run) -> bool:
        if len(self._runs) >= self.options.buffer:
            self.dropped += 1
            return False
        self._runs.append(run)
        return True

    def failed(self, run: Run, error: Any, traceback: Any, **facts: Any) -> None:
        """It has failed, of this error."""
        found = {**_said(error), **facts}
        if traceback:
            found["traceback"] = str(traceback)[-TRACEBACK_LENGTH:]
        self.ended(run, "-", found)

    def retrying(self, run: Run, error: Any, traceback: Any, **facts: Any) -> None:
        """It is to be retried, because of an error or by its own will."""
        cause, when = error.exc, error.when
        at_ms = int(time.time() * 1000)
        if isinstance(when, datetime):
            at_ms = int(when.timestamp() * 1000)
        elif isinstance(when, (int, float)):
            at_ms += int(when * 1000)
        found = {"next_ms": at_ms, **facts}
        if cause is not None:
            found |= _said(cause)
            found["traceback"] = str(traceback or "")[-TRACEBACK_LENGTH:]
        self.ended(run, "~", found)

    # The thread.

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write what is left, if Redis takes it soon."""
        self._ending.set()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._ending.wait(self.options.interval_seconds):
            self.step()
        self.step(ends=True)
        self._broker.close()

    def step(self, ends: bool = False) -> None:
        """Write what has happened since, and say that this worker is alive, or that it ends."""
        try:
            while True:
                self._gather()
                self._write()
                if not self._runs:
                    break
            self._beat(ends)
        except Exception:  # whatever it is, the worker and its tasks go on
            logger.exception("Outcomes of tasks were not recorded")
            self._unsent.clear()
        if self.dropped > self._told and not self._failing:
            count, self._told = self.dropped - self._told, self.dropped
            if (meter := instrumentation.current) is not None:
                meter.outcomes_dropped(count)
            logger.warning("%d events of tasks were not recorded: the buffer was full", count)

    def _gather(self) -> None:
        """Make notes of what has happened: all that does between two writes is one note."""
        for _ in range(min(len(self._runs), BATCH)):
            run = self._runs.popleft()
            run.is_seen = True
            unsent = self._unsent.get(run.queue)
            if unsent is None:
                unsent = self._unsent[run.queue] = Unsent({})
                self._live.setdefault(run.queue, set())
            self._see(run)
            if unsent.events >= self.options.buffer:
                self.dropped += 1
                continue
            unsent.events += 1
            self._count(run)
            if (note := self._noted(run)) is not None:
                task = run.id, run.tenant
                before = unsent.notes.get(task)
                unsent.notes[task] = note if before is None else _joined(before, note)

    def _see(self, run: Run) -> None:
        live = self._live[run.queue]
        if run.ended_at:
            if live:
                live.discard(run.id)
        else:
            if len(live) > self.options.buffer:  # the ends of some found no room
                live.clear()
            live.add(run.id)

    def _count(self, run: Run) -> None:
        """What has happened to it since the last note, as a part of how tasks go over time."""
        tallies = self._tallies[run.queue]
        if run.started_at and run.written < 2 and run.due_ms is not None:
            tallies.began(run.task, run.started_at, run.started_at * 1000 - run.due_ms)
        if run.ended_at and run.written < 3 and run.state != "b":
            rest = run.rest
            run_ms = rest * 1000 if run.state == "+" else rest.get("run_ms")
            tallies.ended(run.task, run.ended_at, run.state, run_ms)

    def _noted(self, run: Run) -> Note | None:
        """What has happened to it since the last note; None: nothing has."""
        before, retries = run.written, run.retries
        at_ms, lines, state, is_slow = int(run.received_at * 1000), "", "r", False
        if not before:
            lines = f'["r",{at_ms},{retries},"{self.worker}"]\n'
        if run.started_at:
            state, at_ms = "s", int(run.started_at * 1000)
            if before < 2:
                lines += (
                    f'["s",{at_ms},{retries},"{self.worker}",{run.pid},{1 if run.is_late else 0}]\n'
                )
        if run.ended_at:
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
        run.written = 3 if run.ended_at else 2 if run.started_at else 1
        if not lines:
            return None
        known = run.task, run.tenant
        head = head_of(*known, run.family) if run.family else _head(*known)
        return Note(run.id, state, at_ms, is_slow, head, lines)

    def _write(self) -> None:
        """Write what is gathered. A queue whose node is down keeps its own, and others go on."""
        for queue in [*self._unsent]:
            if self._send(queue, [*self._unsent[queue].notes.values()]):
                del self._unsent[queue]

    def _beat(self, ends: bool) -> None:
        now = time.monotonic()
        for queue in [*self._beat_at] if ends else [*filter(self._live.get, self._live)]:
            if ends or now - self._beat_at.get(queue, -BEAT_SECONDS) >= BEAT_SECONDS:
                self._send(queue, [], 0 if ends else ALIVE_MS)

    def _send(self, queue: str, notes: list[Note], alive_ms: int = ALIVE_MS) -> bool:
        try:
            store = self._broker.store
            calls = Outcomes(store).note_calls(
                queue, notes, self.options.kept, self.worker, alive_ms
            )
            tallies = self._tallies[queue]
            store.all_of([*calls, *tallies.calls(store, queue, self.worker)])
            tallies.were_written()
        except BROKER_FAILS as error:
            if not self._failing:
                logger.warning("Outcomes of tasks are not recorded for now: %s", error)
            self._failing.add(queue)
            return False
        self._beat_at[queue] = time.monotonic()
        if queue in self._failing and (notes or queue not in self._unsent):
            self._failing.discard(queue)
            if not self._failing:
                logger.info("Outcomes of tasks are recorded again")
        return True


def _said(error: Any) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": text_of(error)[:MESSAGE_LENGTH]}


def _overran(run: Run) -> str:
    """The line of a task that nobody has ended at its time limit: it is of that moment."""
    at_ms = int((run.started_at + run.limit_seconds) * 1000)
    facts = json.dumps({"limit_ms": int(run.limit_seconds * 1000)})
    return f'["o",{min(at_ms, int(run.ended_at * 1000))},{run.retries},{facts}]\n'


def _joined(before: Note, note: Note) -> Note:
    return note._replace(
        head=before.head, lines=before.lines + note.lines, is_slow=before.is_slow or note.is_slow
    )


def _number(headers: Any, name: str) -> int:
    number = headers.get(name)
    return number if type(number) is int else 0


def _family(headers: Any) -> Family:
    """The ids of the root, the parent and the group of a task; nothing if it has none of these."""
    parent, group = headers.get("parent_id"), headers.get("group")
    if parent is None and group is None:
        return ()
    found = (headers.get("root_id"), parent, group)
    return tuple(None if each is None else str(each)[:ID_LENGTH] for each in found)


#: The recorder of this process's worker; None: nothing is recorded.
current: Recorder | None = None
