"""One run: servers, workers, load and faults; then the verdict."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.crash import app as crash_app
from tests.crash import limits, remains
from tests.crash.asking import Answerer
from tests.crash.broker import LEASE_SECONDS, Broker, start_broker
from tests.crash.crew import Crew
from tests.crash.evidence import Evidence, changes, occupied, stalls
from tests.crash.faults import Faults, Field, Window
from tests.crash.history import Execution, Key, collect
from tests.crash.journal import SENDER, Line, Reader
from tests.crash.load import GREENLETS, LONG, PREFORK, Senders
from tests.crash.operator import Operator
from tests.crash.pings import Control, Pinger, control_task
from tests.crash.records import read_records
from tests.crash.replicated import QUEUE
from tests.crash.reshard import Reshard
from tests.crash.schedule import CALM_SECONDS, OPERATED, QUIET_SECONDS, schedule
from tests.crash.verdict import Verdict, judge

SETTLE_SECONDS = 10
READY_SECONDS = 60
#: How long a run waits for faults that found something in their way.
OWED_SECONDS = 60

#: A descriptor that is polled in vain for this long will not be dropped.
GHOST_SECONDS = 1.0


@dataclass(frozen=True)
class Order:
    """The settings of a run. `every_seconds` is the mean time between two faults."""

    seconds: float
    seed: int
    transport: str = "delayed"
    rate: float = 40
    every_seconds: float = 5
    keep: Path | None = None
    server: str = "single"
    #: Messages of the queue whose slot moves as a whole, on a Cluster.
    reshard: int = 20_000

    @property
    def has_policies(self) -> bool:
        """Whether its load has limits and expects answers."""
        return self.transport == "delayed"


@dataclass
class Result:
    order: Order
    verdict: Verdict
    executions: dict[Key, Execution]
    sent: int
    refused: int
    faults: Counter[str]
    crew: Crew
    server: str
    #: When faults, and what looks like one, began and ended.
    windows: list[Window] = field(default_factory=list)
    #: The longest waits in moves of large slots, and how many of these were given up.
    stalls_ms: list[float] = field(default_factory=list)
    given_up: int = 0
    #: How many messages of such a slot remained at the end.
    kept: int = 0


Report = Callable[[str, float, str], None]


def run(order: Order, report: Report = lambda stage, share, text: None) -> Result:
    """`report` gets the stage, its share done and figures, a few times a second."""
    with contextlib.ExitStack() as stack:
        directory = order.keep and order.keep.resolve()
        if directory is None:
            made = tempfile.TemporaryDirectory(prefix="kombu-delayed-crash-")
            directory = Path(stack.enter_context(made))
        broker = stack.enter_context(start_broker(order.server, order.transport, directory))
        control = stack.enter_context(control_task(directory / "control"))
        queues = (QUEUE, *limits.QUEUES) if order.has_policies else (QUEUE,)
        crew = Crew(broker.settings, directory, queues)
        stack.callback(crew.close)
        app = crash_app.make_app(broker.settings(None))
        senders = Senders(
            app, order.seed, order.rate, Answerer(app) if order.has_policies else None
        )
        if broker.cluster and order.reshard:
            reshard = broker.more["reshard"] = Reshard(app, broker.cluster, order.reshard)
            reshard.fill()
        with crash_app.writing(directory / "journals", SENDER):
            reader = Reader(directory / "journals")
            return _Run(order, broker, crew, senders, control, reader, report).run()


@dataclass
class _Run:
    order: Order
    broker: Broker
    crew: Crew
    senders: Senders
    control: Control
    reader: Reader
    report: Report
    lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pinger = Pinger(crash_app.make_app(self.broker.settings(None)), self.crew.ready_names)
        self._missing: set[Key] = set()
        self._started: set[Key] = set()
        self._acked: set[str] = set()
        self._last_due = self._last_start = 0.0

    def _make_faults(self) -> Faults:
        order, broker = self.order, self.broker
        shares = dict(broker.shares)
        if not order.has_policies:
            # The stock transport has its own versions, and none of these.
            for kind in ("redeploy", "policyless", *OPERATED):
                del shares[kind]
        if "reshard" not in broker.more:
            shares.pop("large slot moved", None)
        plan = schedule(order.seed, order.seconds, order.every_seconds, shares)
        field = Field(
            *(self.crew, broker.server, broker.network, broker.clock, self.senders),
            LEASE_SECONDS,
            started=lambda id: (id, 0) in self._started,
            ended=lambda id: id in self._acked,
            operator=Operator(crash_app.make_app(broker.settings(None)))
            if order.has_policies
            else None,
        )
        return broker.faults(field, random.Random(order.seed), plan, **broker.more)

    def run(self) -> Result:
        whole, look_after = lambda: self.crew.is_whole, self.crew.look_after
        self.crew.start()
        self._until("workers start", READY_SECONDS, whole)
        faults = self._make_faults()
        for each in (self.senders, self.control, self.pinger):
            each.start()
        self._until("faults", self.order.seconds, step=faults.step)
        self._until("last faults", OWED_SECONDS, lambda: not faults.owed, faults.step)
        faults.finish()
        self._until("workers start again", READY_SECONDS, whole, look_after)
        for quiet, seconds in (False, CALM_SECONDS - QUIET_SECONDS), (True, QUIET_SECONDS):
            self.senders.quiet = quiet
            self._until("calm", seconds, step=look_after)
        self._until("last sends", 0.5, step=look_after)
        for each in (self.control, self.pinger, self.senders):
            each.stop()
        self._settle()
        if self._remains() and self.order.has_policies:
            faults.go_to_latest()  # so that a question asked while the clock was ahead becomes due
            self._settle()
        ghosts = self._ghosts()
        held = remains.held(self.broker.server)
        self.crew.finish()
        self.lines.extend(self.reader.new_lines())
        return self._result(faults, held, ghosts)

    def _result(self, faults: Faults, held: dict[str, int], ghosts: list[str]) -> Result:
        plans, server = list(self.senders.plans.values()), self.broker.server
        executions = collect(self.lines, plans)
        windows = [*faults.windows, *stalls(self.lines), *changes(self.crew.lives)]
        windows += occupied(executions, plans)
        reshard: Reshard | None = self.broker.more.get("reshard")
        kept = reshard.empty() if reshard else 0
        previous = {f"{life.name}@test" for life in self.crew.lives if life.unlike == "previous"}
        leaked = remains.leaks(remains.all_keys(server))
        evidence = Evidence(
            {life.name: life for life in self.crew.lives},
            windows,
            LEASE_SECONDS,
            remains.messages(server),
            held,
            pings=self.pinger.pings,
            leaked=remains.without_replies_of(server, leaked, previous),
            ghosts=ghosts,
            control=self.control.late(),
        )
        if self.order.has_policies:
            queues = (QUEUE, *limits.QUEUES, LONG, PREFORK, GREENLETS)
            ids = [*dict.fromkeys(id for id, _ in executions)]
            reader = crash_app.make_app(self.broker.settings(None))
            evidence.records = read_records(reader, queues, ids)
            evidence.recorded_at = time.time()
        if self.broker.clock and self.order.has_policies:  # other transports use the worker's clock
            evidence.clock = self.broker.clock.readings
        with server.client() as client:
            version = client.info("server")["valkey_version"]
        return Result(
            self.order,
            judge(executions, evidence),
            executions,
            self.senders.sent,
            self.senders.refused,
            faults.counts,
            self.crew,
            f"Valkey {version}, appendonly yes, {self.broker.safety}",
            windows,
            reshard.stalls_ms if reshard else [],
            reshard.failed if reshard else 0,
            kept,
        )

    def _until(
        self,
        stage: str,
        seconds: float,
        done: Callable[[], bool] = lambda: False,
        step: Callable[[], Any] = lambda: None,
    ) -> None:
        began, read_at = time.monotonic(), 0.0
        while not done() and (passed := time.monotonic() - began) < seconds:
            step()
            if time.monotonic() - read_at > 0.5:
                self._read()
                read_at = time.monotonic()
                figures = f"{self.senders.sent} sent, {len(self._started)} run"
                self.report(stage, passed / seconds, figures)
            time.sleep(0.02)

    def _read(self) -> None:
        for line in self.reader.new_lines():
            self.lines.append(line)
            key, event = (line["id"], line["retries"]), line["event"]
            if event == "ready":
                self.crew.is_ready(line["owner"], line["at"])
            elif event == "start":
                self._started.add(key)
                self._last_start = max(self._last_start, line["at"])
                self._missing.discard(key)
            elif event in ("ack", "end"):
                self._acked.add(line["id"])
            elif event in ("taken", "published"):
                if key not in self._started and (event == "taken" or line["owner"] != SENDER):
                    self._missing.add(key)
                if line.get("eta"):
                    due = datetime.fromisoformat(line["eta"]).timestamp()
                    self._last_due = max(self._last_due, due)

    def _settle(self) -> None:
        """Wait until all tasks have run and left the server, or none has run for too long."""
        ended = time.time()

        def over() -> bool:
            last = max(self._last_due, self._last_start, self.crew.changed_at, ended)
            quiet = time.time() > last + LEASE_SECONDS + SETTLE_SECONDS
            late = quiet and not self.crew.is_ending
            return late or not (self.senders.busy or self._missing or self._remains())

        self._until("settling", 120, over, self.crew.look_after)

    def _ghosts(self) -> list[str]:
        """Descriptors seen twice: a connection may be made anew just now."""
        before = self.crew.ghosts()
        time.sleep(GHOST_SECONDS)
        return sorted({*before} & {*self.crew.ghosts()})

    def _remains(self) -> bool:
        server = self.broker.server
        return bool(remains.messages(server) or remains.held(server))
