"""Policies of all queues apply if a queue or a task has none of their kind."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest
from kombu import Producer

from celery_ext.policies import (
    Backoff,
    DropOlder,
    Fair,
    HandOver,
    Limit,
    Policy,
    PolicyError,
    Timeout,
    Window,
)
from celery_ext.policies.declared import DeclaredPolicies
from celery_ext.policies.steps import apply
from tests.kit.policed import OpenApp, take

HOUR, DAY, WEEK = Timeout("1h"), Timeout("24h"), Timeout("7d")
SOON, LATE = Backoff(1), Backoff(60)


@pytest.mark.parametrize(
    ("of_task", "queue", "found", "strategy"),
    [
        ((), "any", (DAY, SOON), SOON),
        ((), "slow", (SOON, WEEK, DropOlder), SOON),
        ((HOUR,), "any", (SOON, HOUR), SOON),
        ((HOUR, LATE), "slow", (WEEK, DropOlder, HOUR, LATE), LATE),
    ],
)
def test_which_hold(
    of_task: tuple[Policy, ...], queue: str, found: tuple[Policy, ...], strategy: Backoff
) -> None:
    drop = DropOlder("6h")
    declared = DeclaredPolicies({"*": [DAY, SOON], "slow": [WEEK, drop]})
    expected = tuple(drop if each is DropOlder else each for each in found)
    assert declared.of(queue, of_task) == expected
    assert declared.strategy(queue, of_task) is strategy


def test_a_task_of_any_queue_runs_out_of_time(open_app: OpenApp) -> None:
    app = open_app(DAY, queue="*")

    @app.task(name="patient", shared=False, policies=[WEEK])
    def patient() -> None: ...

    eta = datetime.now(timezone.utc) - timedelta(hours=25)
    app.send_task("record", task_id="late", eta=eta)
    app.send_task("patient", task_id="patient", eta=eta)
    assert take(app).headers["id"] == "patient"
    assert take(app) is None
    letter = app.delayed.dead.show("late").letter
    assert letter.reason == "not started within 1d of its due time"


def test_a_task_of_any_queue_is_retried(open_app: OpenApp) -> None:
    app = open_app(SOON, queue="*")

    @app.task(name="plain", shared=False)
    def plain() -> None: ...

    apply(app)
    assert plain.run.retrying.strategy_of("celery", (), {}) is SOON


def test_what_is_no_task_is_left_alone(open_app: OpenApp) -> None:
    later = datetime.now(timezone.utc) + timedelta(hours=5)
    app = open_app(Window(f"{later:%H:%M}-{later + timedelta(hours=2):%H:%M}"), queue="*")
    with app.connection_for_write() as connection:
        Producer(connection).publish("reply", routing_key="celery")
    app.send_task("record", task_id="waits")
    message = take(app)
    assert message.payload == "reply"
    assert take(app) is None
    assert app.delayed.get("waits").state == "delayed"


@pytest.mark.parametrize(
    "policy",
    [lambda: Limit(concurrency=1), lambda: Fair(by="tenant"), lambda: HandOver(queue="other")],
)
def test_what_only_a_queue_can_have(open_app: OpenApp, policy: Callable[[], Policy]) -> None:
    with pytest.raises(PolicyError, match=r"of '\*': .* is for single queues: name these"):
        DeclaredPolicies({"*": [policy()]})
