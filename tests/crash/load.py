"""The load: a steady stream of tasks of all kinds, and the plan for each."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from celery import Celery, chain
from kombu.utils.uuid import uuid

from tests.crash import asking, limits
from tests.crash.asking import Answerer
from tests.crash.journal import write
from tests.crash.limits import Uses

#: Shares of the kinds of tasks, and of those that other brokers do not have.
KINDS = {"now": 40, "countdown": 35, "retry": 13, "chain": 12}
OWN_KINDS = {"limited": 20, "ask": 12}

#: Tasks with limits are due at the same instants, this many seconds apart.
TOGETHER_SECONDS = 3

#: The share of the load that remains in quiet times.
QUIET_SHARE = 0.05

#: The queues of tasks that only some pools have: any but solo, prefork, greenlets.
LONG, PREFORK, GREENLETS = "long", "prefork", "greenlets"
#: How long a task that its pool ends would take, and the hard time limit that may end it.
OVERRUN_SECONDS, LIMIT_SECONDS = 20.0, 1.0

Made = tuple["Plan", Any, dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """The plan for a task that was sent. `then` is the id of the task that follows in a chain.

    A task with `seconds` keeps its worker from others. Its pool ends one that is `cut_short`.
    """

    id: str
    kind: str
    late: bool
    retries: int = 0
    then: str = ""
    uses: Uses = ()
    seconds: float = 0
    cut_short: bool = False


class Senders:
    """Threads that send tasks until they are stopped; with an `answerer`, tasks of all kinds."""

    def __init__(
        self, app: Celery, seed: int, rate: float, answerer: Answerer | None, threads: int = 2
    ) -> None:
        self.app = app
        self._answerer = answerer
        self._kinds = {**KINDS, **OWN_KINDS} if answerer else KINDS
        self.plans: dict[str, Plan] = {}
        self.sent = self.refused = 0
        self._ordered: deque[Made] = deque()
        self._rate = rate / threads
        #: Whether almost nothing is sent: workers are idle until they are woken.
        self.quiet = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{n}"),), daemon=True)
            for n in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        if self._answerer:
            self._answerer.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        if self._answerer:
            self._answerer.stop()

    @property
    def rate(self) -> float:
        """How many tasks one thread sends per second."""
        return self._rate * (QUIET_SHARE if self.quiet else 1)

    @property
    def busy(self) -> bool:
        return self._answerer is not None and self._answerer.is_alive()

    def send_long(self, seconds: float, queue: str = LONG) -> str:
        """Have a task sent that is acked late and takes this many seconds."""
        return self._order("run_late", Plan(uuid(), "long", True, seconds=seconds), queue)

    def send_busy(self, seconds: float) -> str:
        """Have a task sent that blocks all greenlets of its worker for this many seconds."""
        return self._order("keep_busy", Plan(uuid(), "busy", True, seconds=seconds), GREENLETS)

    def send_overrun(self, late: bool, limit_seconds: float | None = None) -> str:
        """Have a task sent that a process pool ends: by a time limit, or when it is told to."""
        plan = Plan(uuid(), "overrun", late, seconds=OVERRUN_SECONDS, cut_short=True)
        task = "run_late" if late else "run_early"
        return self._order(task, plan, PREFORK, time_limit=limit_seconds)

    def _order(self, task: str, plan: Plan, queue: str, **options: Any) -> str:
        signature = self.app.tasks[task].si(seconds=plan.seconds).set(task_id=plan.id)
        self._ordered.append((plan, signature, {"queue": queue, **options}))
        return plan.id

    def _run(self, rng: random.Random) -> None:
        at = time.monotonic()
        while not self._stop.wait(max(at - time.monotonic(), 0)):
            at = max(at, time.monotonic() - 1) + rng.uniform(0.2, 1.8) / self.rate
            while self._ordered:
                with contextlib.suppress(IndexError):  # the other thread was faster
                    self._send(*self._ordered.popleft())
            self._send(*self._make(rng))

    def _send(self, plan: Plan, signature: Any, options: dict[str, Any]) -> None:
        with self._lock:
            self.plans[plan.id] = plan
            self.sent += 1
        try:
            signature.apply_async(**options)
        except Exception as error:
            write("refused", plan.id, 0, error=repr(error))
            with self._lock:
                self.refused += 1
        else:
            write("taken", plan.id, 0)

    def _make(self, rng: random.Random) -> Made:
        kind = rng.choices(list(self._kinds), list(self._kinds.values()))[0]
        late = rng.random() < 0.5
        id = uuid()
        if kind == "ask":
            return self._make_question(rng, late, id)
        if kind == "limited":
            return self._make_limited(rng, late, id)
        first = self._signature(rng, late, id)
        options = {"priority": rng.randrange(10)} if rng.random() < 0.3 else {}
        if kind == "countdown":
            first.set(countdown=_countdown(rng))
        if kind == "retry":
            retries = rng.randint(1, 3)
            first.kwargs.update(retries=retries, countdown=round(rng.uniform(0.1, 3), 2))
            return Plan(id, kind, late, retries), first, options
        if kind == "chain":
            second = self._signature(rng, rng.random() < 0.5, uuid())
            second.set(countdown=round(rng.uniform(0.1, 4), 2))
            then = second.options["task_id"]
            return Plan(id, kind, late, 0, then), chain(first, second), options
        return Plan(id, kind, late), first, options

    def _make_question(self, rng: random.Random, late: bool, id: str) -> Made:
        countdown, timeout, answers = asking.draw(rng)
        tenant = rng.choice([None, "ada"])
        if self._answerer:
            self._answerer.give(id, tenant, answers)
        task = self.app.tasks["ask_late" if late else "ask_early"]
        options: dict[str, Any] = {"headers": {"tenant": tenant}} if tenant else {}
        if countdown:
            options["countdown"] = countdown
        return Plan(id, "ask", late), task.si(timeout=timeout).set(task_id=id), options

    def _make_limited(self, rng: random.Random, late: bool, id: str) -> Made:
        queue, arguments, headers, uses = limits.draw(rng)
        retries = int(rng.random() < 0.15)
        seconds = round(rng.uniform(0.1, 0.4), 3)
        arguments = {**arguments, "seconds": seconds, "retries": retries}
        task = self.app.tasks["run_late" if late else "run_early"]
        signature = task.si(countdown=round(rng.uniform(0.1, 1), 2), **arguments)
        wait_seconds = TOGETHER_SECONDS - time.time() % TOGETHER_SECONDS
        options = {"queue": queue, "headers": headers, "countdown": wait_seconds}
        return Plan(id, "limited", late, retries, uses=uses), signature.set(task_id=id), options

    def _signature(self, rng: random.Random, late: bool, id: str) -> Any:
        # Most are short; some are still running when their worker is killed.
        seconds = rng.uniform(0.2, 1.0) if rng.random() < 0.05 else rng.uniform(0, 0.03)
        task = self.app.tasks["run_late" if late else "run_early"]
        return task.si(seconds=round(seconds, 3)).set(task_id=id)


def _countdown(rng: random.Random) -> float:
    return round(20 ** rng.random() * rng.choice([0.1, 1]), 2)
