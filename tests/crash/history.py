"""The journals put together: the history of each execution, identified by task id and retry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from tests.crash.clock import Readings
from tests.crash.journal import REJECTED, SENDER, Line
from tests.crash.limits import Uses
from tests.crash.load import Plan

#: A task id and a retry number.
Key = tuple[str, int]
NEVER = float("inf")


@dataclass
class Run:
    """One time that a task's code ran. `end` is never if its process died."""

    owner: str
    start: float
    redelivered: bool
    late: bool
    eta: str | None
    end: float = NEVER
    outcome: str = ""


@dataclass
class Hold:
    """One time that a worker received the message."""

    owner: str
    at: float
    accepted: float = NEVER
    done: float = NEVER
    run: Run | None = None
    requeued: bool = False


@dataclass
class Execution:
    """A task, or one retry of it, that should run once."""

    key: Key
    lines: list[Line] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    expected: bool = False
    #: The execution that publishes this one; None: the sender does.
    parent: Key | None = None
    #: The capacity of limits that it takes.
    uses: Uses = ()
    #: Whether its pool should end it.
    cut_short: bool = False

    def at(self, event: str) -> float:
        return min((line["at"] for line in self.lines if line["event"] == event), default=NEVER)

    def latest(self, event: str) -> float:
        return max((line["at"] for line in self.lines if line["event"] == event), default=-NEVER)

    @property
    def due(self) -> float | None:
        """The ETA, in seconds since the epoch."""
        etas = [line["eta"] for line in self.lines if line.get("eta")]
        if not etas:
            return None
        moment = datetime.fromisoformat(etas[0])
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()

    @property
    def completed(self) -> bool:
        """Whether it ran to its end; one that is acked when it starts need only start."""
        ends = any(run.outcome in ("done", "retried") for run in self.runs)
        return ends or any(not run.late for run in self.runs) or self.was_cut_short

    @property
    def was_cut_short(self) -> bool:
        """Whether its pool has ended it, as was planned, and its worker has acked it."""
        return self.cut_short and bool(self.runs) and self.at("ack") < NEVER

    @property
    def failed(self) -> bool:
        """Whether its code raised, and not because its worker was told to end."""
        return any(
            run.outcome not in ("", "done", "retried", REJECTED)
            and not run.outcome.startswith("SystemExit")
            for run in self.runs
        )

    @property
    def was_answered(self) -> bool:
        """Whether it is an expectation that did not wait for its timeout."""
        return any(line.get("answered") for line in self.lines)

    def wanted_at(self, clock: Readings) -> float:
        """When it was sent, or if later, when the server's clock had reached its ETA."""
        sent = self.at("publish")
        if self.due is None:
            return sent
        if sent == NEVER:
            return clock.reached(self.due)
        # The due time of a question counts from when it reaches the server.
        is_question = any("answered" in line for line in self.lines)
        later = clock.least_ahead(sent, max(sent, self.latest("published"))) if is_question else 0
        return clock.reached(self.due + later, sent)

    def describe(self) -> str:
        lines = []
        for line in self.lines:
            known = ("event", "at", "monotonic", "owner", "pid", "id", "retries")
            more = {name: value for name, value in line.items() if name not in known}
            lines.append(
                f"    {line['at']:.3f}  {line['owner']:<12} {line['pid']:<7} "
                f"{line['event']:<14} {more or ''}"
            )
        return f"  {self.key[0]} retry {self.key[1]}\n" + "\n".join(lines)


def collect(lines: Iterable[Line], plans: Sequence[Plan]) -> dict[Key, Execution]:
    """All executions that were planned or that happened."""
    executions: dict[Key, Execution] = {}
    for line in sorted(lines, key=lambda line: line["at"]):
        if line["event"] != "ready":
            key = line["id"], line["retries"]
            executions.setdefault(key, Execution(key)).lines.append(line)
    _expect(executions, plans)
    uses = {plan.id: plan.uses for plan in plans}
    cut_short = {plan.id for plan in plans if plan.cut_short}
    for (id, _), execution in executions.items():
        execution.uses = uses.get(id, ())
        execution.cut_short = id in cut_short
        _follow(execution)
    return executions


def _expect(executions: dict[Key, Execution], plans: Sequence[Plan]) -> None:
    """Only a task that is acked late surely completes all its steps; others may die on the way."""
    for execution in executions.values():
        events = {(line["event"], line["owner"]) for line in execution.lines}
        execution.expected = ("taken", SENDER) in events or any(
            event == "published" and owner != SENDER for event, owner in events
        )
    for plan in plans:
        first = executions.get((plan.id, 0))
        follows = [(plan.id, n) for n in range(1, plan.retries + 1)]
        follows += [(plan.then, 0)] * bool(plan.then)
        for key in follows if plan.late and first and first.expected else ():
            executions.setdefault(key, Execution(key)).expected = True
        if (plan.then, 0) in executions:
            executions[plan.then, 0].parent = plan.id, plan.retries
    for (id, retries), execution in executions.items():
        if retries:
            execution.parent = id, retries - 1
        for line in execution.lines:
            if line.get("sent_by"):
                execution.parent = line["sent_by"], 0


def _follow(execution: Execution) -> None:
    """Pair starts with ends, and each delivery with its outcome."""
    running: dict[tuple[str, int], list[Run]] = defaultdict(list)
    held: dict[str, list[Hold]] = defaultdict(list)
    for line in execution.lines:
        owner, at, event = line["owner"], line["at"], line["event"]
        if event == "received":
            hold = Hold(owner, at)
            execution.holds.append(hold)
            held[owner].append(hold)
        elif event == "accepted":
            _first(held[owner], "accepted", at)
        elif event in ("ack", "reject"):
            _first(held[owner], "done", at, requeued=bool(line.get("requeue")))
        elif event == "start":
            run = Run(owner, at, line["redelivered"], line["late"], line["eta"])
            execution.runs.append(run)
            running[owner, line["pid"]].append(run)
            _first(held[owner], "run", run)
        elif event == "end" and running[owner, line["pid"]]:
            run = running[owner, line["pid"]].pop(0)
            run.end, run.outcome = at, line["outcome"]


def _first(holds: Sequence[Hold], name: str, value: float | Run, *, requeued: bool = False) -> None:
    for hold in holds:
        if getattr(hold, name) in (None, NEVER):
            setattr(hold, name, value)
            hold.requeued |= requeued
            return
