"""How late, early, unanswered and leaked are judged if clocks step and pools end tasks."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from tests.crash import verdict
from tests.crash.clock import Readings
from tests.crash.evidence import (
    HOPS,
    LATE_MS,
    OCCUPIED,
    POLL_SECONDS,
    RECOVERY_SECONDS,
    changes,
    occupied,
)
from tests.crash.faults import Window
from tests.crash.history import NEVER, collect
from tests.crash.journal import SENDER
from tests.crash.load import Plan
from tests.crash.pings import Ping
from tests.crash.remains import leaks, without_replies_of
from tests.crash.schedule import CALM_SECONDS, schedule, shares
from tests.crash.test_verdict import causes, judged, life, lines, ran, sent, task
from tests.crash.verdict import Verdict

Lines = list[dict[str, Any]]


def at_once(number: int, late_ms: float) -> Lines:
    """Tasks sent at 90 s, and started this many milliseconds later."""
    published = lines(SENDER, (90, "publish", {}), (90, "taken", {}))
    run = task("", "other", 90 + late_ms / 1000, 95)
    return [dict(line, id=f"t{number}") for line in [*published, *run]]


def late_by(*late_ms: float, **evidence: Any) -> Verdict:
    journals = (at_once(n, each) for n, each in enumerate(late_ms))
    return judged(life("first"), *journals, **evidence)


def test_one_in_a_hundred_may_be_late() -> None:
    punctual = [LATE_MS * 0.9] * 99
    assert late_by(*punctual, *punctual, 5000).good
    found = late_by(*punctual, 5000)
    assert found.is_late
    assert not found.good
    assert late_by(*punctual, LATE_MS * 0.95).good


def test_a_machine_that_is_slow_makes_tasks_late() -> None:
    late_ms = LATE_MS * 2
    control = [(90.0, 90 + late_ms / HOPS / 1000 * 1.01)]
    assert late_by(late_ms, control=control).good
    control = [(90.0, 90 + late_ms / HOPS / 1000 * 0.99)]
    assert not late_by(late_ms, control=control).good


def test_what_a_control_task_met_in_a_fault_is_no_excuse() -> None:
    fault = Window("cut", 60, 61)
    found = late_by(LATE_MS * 2, control=[(60.5, 61.5)], windows=[fault])
    assert found.control_ms == []
    assert not found.good


@pytest.mark.parametrize(
    ("kind", "ended", "good"),
    [
        ("cut", 90 - RECOVERY_SECONDS * 0.9, True),
        ("cut", 90 - RECOVERY_SECONDS * 1.1, False),
        ("clock hour", 90 - RECOVERY_SECONDS - POLL_SECONDS * 0.9, True),
        ("clock hour", 90 - RECOVERY_SECONDS - POLL_SECONDS * 1.1, False),
        (OCCUPIED, 90 - RECOVERY_SECONDS * 1.1, False),
    ],
)
def test_faults_and_recovery_excuse_what_is_late(kind: str, ended: float, good: bool) -> None:
    assert late_by(3000, windows=[Window(kind, 80, ended)]).good == good


def test_workers_that_begin_or_end_are_no_calm() -> None:
    facts = {"started_at": 80.0, "ready_at": 84.0, "fate": "terminated", "fated_at": 90.0}
    began, ended = changes([life("first", **facts)])
    assert (began.began, began.ended, ended.began, ended.ended) == (80.0, 84.0, 90.0, 90.0)
    (never,) = changes([life("first", started_at=80.0, ready_at=NEVER)])
    assert never.ended < NEVER


def test_a_task_that_keeps_its_worker_busy_is_no_calm() -> None:
    executions = collect(task("t", "first", 90, None), [])
    found = occupied(executions, [Plan("t", "busy", True, seconds=3)])
    assert [(each.kind, each.began, each.ended) for each in found] == [(OCCUPIED, 90, 93)]
    assert not [*occupied(executions, [Plan("t", "now", True)])]


def ping(at: float, *answered: str) -> Ping:
    return Ping(at, at + 3, frozenset({"first"}), frozenset(answered))


@pytest.mark.parametrize(
    ("asked", "facts", "windows", "good"),
    [
        (ping(90, "first"), {}, [], True),
        (ping(90), {}, [], False),
        (ping(90), {"fate": "terminated", "fated_at": 92.0}, [], True),
        (ping(90), {"fate": "terminated", "fated_at": 94.0}, [], False),
        (ping(90), {"ready_at": 90.0 - RECOVERY_SECONDS / 2}, [], True),
        (ping(90), {}, [Window("cut", 92, 92.5)], True),
        (ping(90), {}, [Window("cut", 87, 88)], False),
    ],
)
def test_workers_answer_pings(
    asked: Ping, facts: dict[str, Any], windows: list[Window], good: bool
) -> None:
    found = judged(life("first", **facts), pings=[asked], windows=windows)
    assert found.good == good
    assert found.pings.unanswered == ([] if good else [(90, "first")])


@pytest.mark.parametrize(
    ("key", "leaked"),
    [
        ("_kombu.binding.celery", False),
        ("{turns}:granted-by", False),
        ("celery", True),
        ("{celery}:wake", True),
        ("{celery}:unacked:vm:1:abc", True),
        ("{reply.celery.pidbox}:consumers", True),
        ("3f2e.reply.celery.pidbox", True),
    ],
)
def test_few_keys_may_stay(key: str, leaked: bool) -> None:
    assert leaks([key]) == [key] * leaked


REPLIES = "3f2e.reply.celery.pidbox"


class Lists:
    """A server that has replies of some workers in a list of that name."""

    def __init__(self, name: str, *workers: str) -> None:
        self._name = name
        bodies = [base64.b64encode(json.dumps({who: {"ok": "pong"}}).encode()) for who in workers]
        self._replies = [json.dumps({"body": body.decode()}).encode() for body in bodies]

    @contextmanager
    def client(self) -> Iterator[Lists]:
        yield self

    def lrange(self, name: str, *_: int) -> list[bytes]:
        return self._replies if name == self._name else []


@pytest.mark.parametrize("name", [REPLIES, f"{{{REPLIES}}}"])
@pytest.mark.parametrize(
    ("workers", "leaked"), [(["old"], False), (["old", "new"], True), (["new"], True), ([], True)]
)
def test_late_replies_of_the_previous_version(name: str, workers: list[str], leaked: bool) -> None:
    keys = [name, f"{{{REPLIES}}}:wake"]
    found = without_replies_of(Lists(name, *workers), [*keys, "celery"], {"old"})
    assert found == [*keys * leaked, "celery"]


@pytest.mark.parametrize(
    "left",
    [
        {"leaked": ["celery"]},
        {"held": {"{turns}:gate:slots turns:": 1}},
        {"ghosts": ["first: epoll 7: descriptor 9 is closed"]},
    ],
)
def test_what_is_left_is_a_fault(left: dict[str, Any]) -> None:
    assert judged(life("first")).good
    assert not judged(life("first"), **left).good


ETA = {"eta": "1970-01-01T00:01:40+00:00"}  # 100 s


def stepped(*steps: tuple[float, float]) -> Readings:
    readings = Readings()
    for at, ahead_seconds in steps:
        readings.stepped(at - 0.1, at, ahead_seconds)
    return readings


@pytest.mark.parametrize(
    ("clock", "start", "early", "late_ms"),
    [
        (stepped(), 99.9, True, 0),
        (stepped(), 100.5, False, 500),
        # A step ahead makes it due, and it stays due afterwards.
        (stepped((95, 60)), 95.5, False, 600),
        (stepped((95, 60), (96, 0)), 97, False, 2100),
        (stepped((95, 60), (96, 0)), 94.8, True, 0),
        (stepped((95, 3)), 96.9, True, 0),
        # A step back makes it due later.
        (stepped((95, -60)), 101, True, 0),
        (stepped((95, -60)), 160.5, False, 500),
        (stepped((95, -60), (120, 0)), 120.5, False, 600),
        # It was not there when the clock was ahead.
        (stepped((80, 60), (85, 0)), 95, True, 0),
    ],
)
def test_due_times_are_of_the_server_s_clock(
    clock: Readings, start: float, early: bool, late_ms: float
) -> None:
    journal = [*lines(SENDER, (90, "publish", ETA), (90, "taken", {}))]
    journal += lines("first", (start, "start", ETA), (start + 1, "end", {}))
    found = judged(life("first"), journal, clock=clock)
    assert bool(found.early) == early
    assert found.late_ms == [pytest.approx(late_ms, abs=1)]


def test_a_question_s_timeout_counts_from_when_it_was_asked() -> None:
    facts = {**ETA, "answered": False}
    journal = lines("first", (90, "publish", ETA), (90.1, "published", ETA), (100, "start", facts))
    assert not judged(life("first"), journal, clock=stepped((80, -60))).early
    assert judged(life("first"), journal, clock=stepped((80, -60), (89, 0), (95, -60))).early


CUT_SHORT = [Plan("t", "overrun", True, seconds=20, cut_short=True)]


def test_what_its_pool_ends_has_run_when_it_is_acked() -> None:
    killed = lines("first", (90, "received", {}), (90, "start", {}))
    acked = [*killed, *lines("first", (96, "ack", {}))]
    assert judged(life("first"), sent(), acked, plans=CUT_SHORT).good
    assert not judged(life("first"), sent(), killed, plans=CUT_SHORT).good
    assert not judged(life("first"), sent(), acked).good


def test_what_its_pool_ends_runs_again_where_its_worker_gives_it_back() -> None:
    ended = lines("first", (95, "received", {}), (95.1, "start", {}), (96, "ack", {}))
    again = ran("other", 97)
    assert judged(life("first"), sent(), ended, again, plans=CUT_SHORT).unexplained
    ended[-1].update(event="reject", requeue=True)
    found = judged(life("first"), sent(), ended, again, plans=CUT_SHORT)
    assert found.repeats == {verdict.EXECUTING: 1}
    assert causes(life("first"), sent(), ended, again) == {verdict.UNEXPLAINED: 1}


def test_the_first_storm_has_each_kind_once() -> None:
    kinds = shares("single")
    plan = schedule(7, 200, 1.5, kinds)
    assert plan == schedule(7, 200, 1.5, kinds)
    assert sorted(kind for _, kind in plan[: len(kinds)]) == sorted(kinds)
    times = [at for at, _ in plan]
    assert times == sorted(times)
    pauses = [b - a for a, b in pairwise(times)]
    assert sum(pause > CALM_SECONDS for pause in pauses) >= 2
