"""Whether the records of workers about tasks match what happened: neither less nor more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from celery import Celery

from celery_ext import Delayed
from celery_ext.control.outcomes import newest
from celery_ext.tasks.history import Step, TaskHistory
from kombu_delayed.store.outcomes.records import ALIVE_SECONDS, Known
from tests.crash.crew import Life
from tests.crash.evidence import DEATHS, FAILOVERS, Evidence
from tests.crash.history import NEVER, Execution, Run
from tests.crash.schedule import AWAY, CLOCKS

#: A worker writes once a second; a busy machine takes longer.
WRITTEN_SECONDS = 4.0
#: How many ids are read at once.
PART = 100


@dataclass
class Records:
    """How many records were compared, and the faults found, a line for each."""

    runs: int = 0
    steps: int = 0
    #: Runs whose start or end is not in their record.
    missing: list[str] = field(default_factory=list)
    #: Recorded starts and successes that never were.
    untrue: list[str] = field(default_factory=list)
    #: Tasks recorded as running by workers that have ended.
    running: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.missing or self.untrue or self.running)


def read_records(app: Celery, queues: Sequence[str], ids: Sequence[str]) -> dict[str, TaskHistory]:
    """The records of these tasks, each of all queues as one."""
    delayed, found = Delayed(app), dict[str, list[TaskHistory]]()
    try:
        store = delayed.store
        for shard in (shard for queue in queues for shard in store.shards.all(queue)):
            for at in range(0, len(ids), PART):
                answer = store.ask("outcomes", shard, ids=ids[at : at + PART])
                for id, text, alive in zip(answer[::3], answer[1::3], answer[2::3], strict=True):
                    known = Known(shard, id.decode(), text, bool(alive))
                    found.setdefault(known.id, []).append(TaskHistory.of(known))
    finally:
        delayed.close()
    return {id: one for id, each in found.items() if (one := newest(each)) is not None}


def judge_records(executions: Iterable[Execution], evidence: Evidence) -> Records:
    """Compare records with journals; a run without records has nothing to compare."""
    verdict, judge = Records(), _Judge(evidence)
    if evidence.records is None:
        return verdict
    for execution in executions:
        history = evidence.records.get(execution.key[0])
        steps = [*_steps(history, execution.key[1])]
        for run in execution.runs:
            judge.run(execution, run, steps, verdict)
        for step in steps:
            judge.step(execution, step, verdict)
    for history in evidence.records.values():
        judge.last(history, verdict)
    return verdict


def _steps(history: TaskHistory | None, retries: int) -> Iterable[Step]:
    return (step for step in (history.steps if history else ()) if step.attempt == retries + 1)


class _Judge:
    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.lives: Mapping[str, Life] = {f"{n}@test": life for n, life in evidence.lives.items()}

    def run(self, execution: Execution, run: Run, steps: Sequence[Step], verdict: Records) -> None:
        """A run has a record of its start and of its end, unless no worker could write it."""
        life = self.evidence.lives.get(run.owner)
        if life is None or life.unlike == "previous":
            return
        if self.was_written(life, run.start):
            verdict.runs += 1
            starts = {step.worker for step in steps if step.event == "started"}
            if f"{run.owner}@test" not in starts:
                verdict.missing.append(f"no start by {run.owner}:\n{execution.describe()}")
        has_end = any(step.event not in ("received", "started", "overran") for step in steps)
        if run.end < NEVER and not has_end and self.was_written(life, run.end):
            verdict.missing.append(f"no end by {run.owner}:\n{execution.describe()}")

    def step(self, execution: Execution, step: Step, verdict: Records) -> None:
        """A recorded start was accepted by that worker, and a recorded success did end."""
        verdict.steps += 1
        if step.event == "started":
            begun = {run.owner for run in execution.runs}
            begun |= {hold.owner for hold in execution.holds if hold.accepted < NEVER}
            is_true = step.worker.removesuffix("@test") in begun
        elif step.event == "succeeded":
            is_true = any(run.outcome == "done" for run in execution.runs)
        else:
            return
        if not is_true:
            verdict.untrue.append(f"{step.event} by {step.worker}:\n{execution.describe()}")

    def last(self, history: TaskHistory, verdict: Records) -> None:
        life = self.lives.get(history.worker)
        if history.state != "running" or life is None or self.was_ahead(life):
            return
        if life.ended_at == NEVER:
            return
        is_told = life.fate not in DEATHS and self.was_written(life, life.ended_at, "of its end")
        if is_told or life.ended_at + ALIVE_SECONDS + WRITTEN_SECONDS < self.evidence.recorded_at:
            verdict.running.append(f"{history.id} by {life.name}, {life.fate}")

    def was_written(self, life: Life, at: float, what: str = "") -> bool:
        """Whether a worker had time to write its state as of `at`, and nothing was lost since."""
        written = at + WRITTEN_SECONDS
        spans = [tuple(stop) for stop in life.stops]
        for window in sorted(self.evidence.windows, key=lambda window: window.began):
            since, until = window.began - WRITTEN_SECONDS, window.ended + WRITTEN_SECONDS
            if window.kind in FAILOVERS and since <= written and at <= until:
                return False
            if window.kind in AWAY or window.victim == life.name:
                spans.append((window.began, window.ended))
        for began, ended in sorted(spans):
            if began <= written and at <= ended:
                written = ended + WRITTEN_SECONDS
        if what:  # a worker that ends waits for Redis only for a moment
            return written == at + WRITTEN_SECONDS
        return written < min(life.fated_at, life.ended_at)

    def was_ahead(self, life: Life) -> bool:
        """Whether it reported being alive while the server's clock was ahead."""
        return any(
            window.kind in CLOCKS
            and window.ended > life.started_at
            and window.began < life.ended_at
            for window in self.evidence.windows
        )
