"""Records what becomes of tasks: a worker's hooks note it, and a thread writes it to Redis."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from celery import Celery
from celery.utils.log import get_logger

from kombu_delayed.store.outcomes import ALIVE_SECONDS, BEAT_SECONDS, Note, Outcomes

from ..errors import BROKER_FAILS
from ..tasks.failures import TRACEBACK_LENGTH
from .broker import Broker
from .outcome_options import OutcomeOptions

logger = get_logger(__name__)

#: So much is kept of an error's text, and of the arguments of what has failed.
MESSAGE_LENGTH, ARGUMENTS_LENGTH = 300, 200

#: A worker that ends waits so long for Redis to take what it has to say.
STOP_SECONDS = 2.0

#: So many events are written in one go: others have the interpreter in between.
BATCH = 500

ALIVE_MS = int(ALIVE_SECONDS * 1000)


class Subject(NamedTuple):
    """A task in a worker: what its outcomes are written under."""

    queue: str
    id: str
    task: str
    tenant: Any
    retries: int


@dataclass
class Unsent:
    """The notes of a queue that Redis has yet to take, by id, of so many events."""

    notes: dict[str, Note]
    events: int = 0


#: State, whose it is, when (s), and the rest of its line.
Event = tuple[str, Subject, float, Any]


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
        self._events: deque[Event] = deque()
        self._ending = threading.Event()
        self._live: dict[str, set[str]] = {}
        self._beat_at: dict[str, float] = {}
        self._unsent: dict[str, Unsent] = {}
        self._told = 0
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="delayed-outcomes", daemon=True)

    # What hooks call, in whichever thread.

    def note(self, state: str, subject: Subject, rest: Any = None) -> None:
        """Remember that something has happened just now."""
        if len(self._events) >= self.options.buffer:
            self.dropped += 1
            return
        self._events.append((state, subject, time.time(), rest))

    def failed(self, subject: Subject, error: Any, traceback: Any, **facts: Any) -> None:
        """Remember a failure, with what is known of the task."""
        name, text = type(error).__name__, str(error)[:MESSAGE_LENGTH]
        found = {"error": name, "message": text, **facts}
        if traceback:
            found["traceback"] = str(traceback)[-TRACEBACK_LENGTH:]
        self.note("-", subject, found)

    def retrying(self, subject: Subject, error: Any, traceback: Any, **facts: Any) -> None:
        """Remember that a task is to be retried, because of an error or by its own will."""
        cause, when = error.exc, error.when
        at_ms = int(time.time() * 1000)
        if isinstance(when, datetime):
            at_ms = int(when.timestamp() * 1000)
        elif isinstance(when, (int, float)):
            at_ms += int(when * 1000)
        found = {"next_ms": at_ms, **facts}
        if cause is not None:
            found |= {"error": type(cause).__name__, "message": str(cause)[:MESSAGE_LENGTH]}
            found["traceback"] = str(traceback or "")[-TRACEBACK_LENGTH:]
        self.note("~", subject, found)

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
                if not self._events:
                    break
            self._beat(ends)
        except Exception:  # whatever it is, the worker and its tasks go on
            logger.exception("Outcomes of tasks were not recorded")
            self._unsent.clear()
        if self.dropped > self._told and not self._is_failing:
            count, self._told = self.dropped - self._told, self.dropped
            logger.warning("%d events of tasks were not recorded: there was no room", count)

    def _gather(self) -> None:
        """Make notes of events: all that happens to a task between two writes is one note."""
        for _ in range(min(len(self._events), BATCH)):
            event = self._events.popleft()
            state, subject, _, _ = event
            unsent = self._unsent.setdefault(subject.queue, Unsent({}))
            live = self._live.setdefault(subject.queue, set())
            (live.add if state in "rs" else live.discard)(subject.id)
            if len(live) > self.options.buffer:  # the ends of some found no room
                live.clear()
            if unsent.events >= self.options.buffer:
                self.dropped += 1
                continue
            unsent.events += 1
            unsent.notes[subject.id] = self._noted(unsent.notes.get(subject.id), event)

    def _noted(self, before: Note | None, event: Event) -> Note:
        state, subject, at_seconds, rest = event
        at_ms = int(at_seconds * 1000)
        score, is_slow = at_ms, before is not None and before.is_slow
        if state == "r":
            line = f'["r",{at_ms},{subject.retries},"{self.worker}"]\n'
        elif state == "s":
            pid, late = rest
            line = f'["s",{at_ms},{subject.retries},"{self.worker}",{pid},{late}]\n'
        elif state == "+":
            line = f'["+",{at_ms},{subject.retries},{int(rest * 1000)}]\n'
            is_slow = is_slow or rest >= self.options.slow_seconds
        else:
            line = json.dumps([state, at_ms, subject.retries, rest], default=str) + "\n"
            score = rest.get("next_ms", at_ms)
            run_ms = rest.get("run_ms") or 0
            is_slow = is_slow or run_ms >= self.options.slow_seconds * 1000
        if before is None:
            return Note(subject.id, state, score, is_slow, _head(subject), line)
        return Note(subject.id, state, score, is_slow, before.head, before.lines + line)

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
            store.all_of(calls)
        except BROKER_FAILS as error:
            if not self._is_failing:
                self._is_failing = True
                logger.warning("Outcomes of tasks are not recorded for now: %s", error)
            return False
        self._beat_at[queue] = time.monotonic()
        if self._is_failing:
            self._is_failing = False
            logger.info("Outcomes of tasks are recorded again")
        return True


def _head(subject: Subject) -> str:
    if subject.tenant is None and subject.task.isascii() and '"' not in subject.task:
        return f'["t","{subject.task}",null]\n'
    return json.dumps(["t", subject.task, subject.tenant], default=str) + "\n"


#: The recorder of this process's worker; None: nothing is recorded.
current: Recorder | None = None


def write_now(
    broker: Broker, options: OutcomeOptions | None, state: str, of: Iterable[tuple[str, str, str]]
) -> None:
    """Record what this process, which may be no worker, has just done with tasks.

    `of` has the shard, id and name of each, and `state` is why they do not run: "cancelled". That
    Redis does not take it is no error.
    """
    if options is None:
        return
    at_ms, notes = int(time.time() * 1000), dict[str, list[Note]]()
    for shard, id, task in of:
        line = json.dumps(["x", at_ms, 0, {"why": state}]) + "\n"
        head = _head(Subject(shard, id, task, None, 0))
        notes.setdefault(shard, []).append(Note(id, "x", at_ms, False, head, line))
    try:
        outcomes = Outcomes(broker.store)
        broker.store.all_of(
            call
            for shard, each in notes.items()
            for call in outcomes.note_calls(shard, each, options.kept)
        )
    except BROKER_FAILS as error:
        logger.warning("%d tasks are %s, but that is not recorded: %s", len(notes), state, error)


def subject_of(request: Any, shard: str) -> Subject:
    """What is written of a worker's request."""
    headers = request._request_dict
    retries = headers.get("retries")
    tenant = headers.get("tenant")
    return Subject(shard, request.id, request.name, tenant, retries if type(retries) is int else 0)
