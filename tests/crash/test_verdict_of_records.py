"""Whether a record counts as missing, untrue, or of a worker that has ended."""

from __future__ import annotations

from typing import Any

import pytest

from celery_ext.tasks.history import Step, TaskHistory
from tests.crash.evidence import Evidence
from tests.crash.faults import Window
from tests.crash.history import NEVER, collect
from tests.crash.records import WRITTEN_SECONDS, Records, judge_records
from tests.crash.test_verdict import KILLED_AT, LEASE_SECONDS, killed, life, ran

AT = KILLED_AT - 2 * WRITTEN_SECONDS
LATE = KILLED_AT - WRITTEN_SECONDS / 2
WHOLE = ("received", "started", "succeeded")


def history(*events: str, worker: str = "first@test", alive: bool = True) -> TaskHistory:
    steps = [Step(event, n, 1, worker if n < 2 else "") for n, event in enumerate(events)]
    return TaskHistory("celery", "t", "run", None, tuple(steps), alive)


def judged(first: Any, at: float, record: TaskHistory | None, *windows: Window) -> Records:
    executions = collect(ran("first", at), [])
    known = {"lives": {"first": first}, "windows": windows, "lease_seconds": LEASE_SECONDS}
    records = {} if record is None else {"t": record}
    evidence = Evidence(**known, left={}, records=records, recorded_at=KILLED_AT + 3600)
    return judge_records(executions.values(), evidence)


def window(kind: str, since: float, seconds: float, victim: str = "") -> Window:
    return Window(kind, since, since + seconds, victim)


def test_a_run_is_recorded() -> None:
    found = judged(killed(), AT, history(*WHOLE))
    assert (found.good, found.runs, found.steps) == (True, 1, 3)
    assert judged(life("first"), AT, history(*WHOLE)).good


@pytest.mark.parametrize(
    "record",
    [
        None,
        history("received"),
        history("received", "started"),
        history(*WHOLE, worker="other@test"),
    ],
)
def test_a_run_that_is_not(record: TaskHistory | None) -> None:
    assert judged(killed(), AT, record).missing
    assert judged(life("first"), AT, record).missing


@pytest.mark.parametrize(
    ("first", "at", "windows"),
    [
        (killed(), LATE, ()),
        (life("first", unlike="previous"), AT, ()),
        (killed(), AT, (window("server kill", AT, 2 * WRITTEN_SECONDS),)),
        (life("first", fate="killed", fated_at=KILLED_AT, stops=[[AT, NEVER]]), AT, ()),
        (life("first"), AT, (window("failover", AT + 1, 1),)),
    ],
)
def test_what_nobody_could_write(first: Any, at: float, windows: tuple[Window, ...]) -> None:
    assert judged(first, at, None, *windows).good


def test_what_never_happened() -> None:
    executions = collect([], [])
    assert not executions
    found = judged(life("first"), AT, history("received", "started", "succeeded", worker="x@test"))
    assert len(found.untrue) == 1  # another worker began it
    assert len(found.missing) == 1


@pytest.mark.parametrize(
    ("first", "alive", "good"),
    [
        (killed(), True, False),
        (killed(), False, True),
        (life("first", fate="terminated", fated_at=KILLED_AT), True, False),
        (life("first"), True, True),
    ],
)
def test_what_still_runs(first: Any, alive: bool, good: bool) -> None:
    found = judged(first, LATE, history("received", "started", alive=alive))
    assert (not found.running) is good
