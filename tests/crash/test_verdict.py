"""What counts as the cause of a second run, and what does not."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.crash import verdict
from tests.crash.app import SENDER
from tests.crash.faults import Window
from tests.crash.history import collect
from tests.crash.verdict import ACK_SECONDS, Evidence, judge

LEASE_SECONDS = 2.5
PID = 7
KILLED_AT = 100.0
AGAIN_AT = 104.0
JUST_BEFORE = KILLED_AT - ACK_SECONDS / 2
LONG_BEFORE = KILLED_AT - ACK_SECONDS * 2

Event = tuple[float, str, dict[str, Any]]


def life(name: str, pool: str = "threads", **facts: Any) -> Any:
    known = {"pid": PID, "stops": [], "fate": "", "fated_at": verdict.NEVER}
    ended = facts.get("fated_at", verdict.NEVER)
    return SimpleNamespace(name=name, pool=pool, ended_at=ended, **{**known, **facts})


def killed(pool: str = "threads") -> Any:
    return life("first", pool, fate="killed", fated_at=KILLED_AT)


def lines(owner: str, *events: Event, redelivered: bool = False) -> list[dict[str, Any]]:
    run = {"redelivered": redelivered, "late": True, "eta": None, "outcome": "done"}
    base = {"id": "t", "retries": 0, "owner": owner, "pid": PID}
    return [{**base, **run, "event": event, "at": at, **more} for at, event, more in events]


def ran(owner: str, at: float, redelivered: bool = True) -> list[dict[str, Any]]:
    events = ["received", "start", "end", "ack"]
    return lines(
        owner, *[(at + n / 1000, e, {}) for n, e in enumerate(events)], redelivered=redelivered
    )


def sent(*failures: float) -> list[dict[str, Any]]:
    events: list[Event] = [(90, "publish", {}), *((at, "publish failed", {}) for at in failures)]
    return lines(SENDER, *events, (91, "taken", {}))


def causes(first: Any, *journal: list[dict[str, Any]], **evidence: Any) -> Counter[str]:
    known: dict[str, Any] = {"windows": [], "reclaims": [], "unrenewed": []}
    lives = {"first": first, "other": life("other")}
    found = Evidence(
        lives=lives, lease_seconds=LEASE_SECONDS, left=Counter(), **{**known, **evidence}
    )
    return judge(collect([line for part in journal for line in part], []), found).repeats


def events(received: float, end: float | None, ack: float | None) -> list[dict[str, Any]]:
    found: list[Event] = [(received, "received", {}), (received + 0.001, "start", {})]
    found += [(at, name, {}) for at, name in ((end, "end"), (ack, "ack")) if at is not None]
    return lines("first", *found)


@pytest.mark.parametrize(
    ("pool", "end", "ack", "cause"),
    [
        ("threads", None, None, verdict.EXECUTING),
        ("threads", JUST_BEFORE, None, verdict.NOT_ACKED),
        ("threads", JUST_BEFORE, JUST_BEFORE, verdict.NOT_ACKED),
        ("threads", LONG_BEFORE, LONG_BEFORE, verdict.UNEXPLAINED),
        # Acked when it started, and still at work.
        ("threads", None, JUST_BEFORE, verdict.NOT_ACKED),
        ("threads", None, LONG_BEFORE, verdict.UNEXPLAINED),
        ("solo", None, LONG_BEFORE, verdict.EXECUTING),
        ("solo", LONG_BEFORE, LONG_BEFORE, verdict.UNEXPLAINED),
    ],
)
def test_a_worker_is_killed(pool: str, end: float | None, ack: float | None, cause: str) -> None:
    journal = sent(), events(95, end, ack), ran("other", AGAIN_AT)
    assert causes(killed(pool), *journal) == {cause: 1}


@pytest.mark.parametrize(
    ("began", "ended", "cause"),
    [
        (LONG_BEFORE - 0.1, LONG_BEFORE + 0.1, verdict.NOT_ACKED),
        (LONG_BEFORE - 3, LONG_BEFORE - 2, verdict.UNEXPLAINED),
        (KILLED_AT - 9, KILLED_AT - 6, verdict.UNEXPLAINED),
    ],
)
def test_a_worker_is_killed_after_an_outage(began: float, ended: float, cause: str) -> None:
    journal = sent(), events(95, LONG_BEFORE, LONG_BEFORE), ran("other", AGAIN_AT)
    window = Window("server kill", began, ended)
    assert causes(killed(), *journal, windows=[window]) == {cause: 1}


@pytest.mark.parametrize(
    ("seconds", "cause"),
    [(LEASE_SECONDS + 0.5, verdict.ZOMBIE), (LEASE_SECONDS / 2, verdict.UNEXPLAINED)],
)
def test_a_worker_is_stopped(seconds: float, cause: str) -> None:
    stopped = life("first", stops=[[96.0, 96.0 + seconds]])
    journal = sent(), events(95, AGAIN_AT + 1, AGAIN_AT + 1), ran("other", AGAIN_AT)
    assert causes(stopped, *journal) == {cause: 1}


@pytest.mark.parametrize(
    ("unrenewed", "acked", "cause"),
    [
        ([(AGAIN_AT - 2, PID)], AGAIN_AT + 1, verdict.CUT_OFF),
        ([(AGAIN_AT - 2, PID)], AGAIN_AT - 2, verdict.UNEXPLAINED),
        ([(AGAIN_AT - 2, PID + 1)], AGAIN_AT + 1, verdict.UNEXPLAINED),
        ([(AGAIN_AT - 9, PID)], AGAIN_AT + 1, verdict.UNEXPLAINED),
        ([], AGAIN_AT + 1, verdict.UNEXPLAINED),
    ],
)
def test_a_lease_ends(unrenewed: list[tuple[float, int]], acked: float, cause: str) -> None:
    """Of a worker that lives: its own log has to say that it could not renew it."""
    journal = sent(), events(95, acked, acked), ran("other", AGAIN_AT)
    reclaims = [(AGAIN_AT - 0.1, PID)]
    assert causes(life("first"), *journal, reclaims=reclaims, unrenewed=unrenewed) == {cause: 1}


def test_each_failure_to_publish_explains_one_run() -> None:
    runs = [ran("other", at, redelivered=False) for at in (101, 102, 103)]
    assert causes(life("first"), sent(90.5), *runs) == {
        verdict.AMBIGUOUS: 1,
        verdict.UNEXPLAINED: 1,
    }
    assert causes(life("first"), sent(), *runs) == {verdict.UNEXPLAINED: 2}
