"""Timeout, DropOlder, Spread and Latest decide by how late messages are."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from socket import gethostname
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.canvas import Signature
from celery.concurrency import ALIASES
from kombu.exceptions import OperationalError

from celery_ext.policies import (
    Backoff,
    DropOlder,
    Latest,
    Message,
    Policy,
    PolicyError,
    Spread,
    Timeout,
)
from celery_ext.policies.retry.strategies import GIVE_UP_HEADER
from celery_ext.policies.steps import Policies, apply
from celery_ext.policies.times import timeout
from tests.kit.policed import OpenApp, let_time_pass, take


def send_late(app: Celery, id: str, minutes: float, **more: Any) -> Any:
    eta = datetime.now(timezone.utc) - timedelta(minutes=minutes)
    return app.send_task("record", task_id=id, eta=eta, **more)


def take_all(app: Celery) -> list[str]:
    found = []
    while (message := take(app)) is not None:
        found.append(message.headers["id"])
    return found


def events(app: Celery, name: str) -> dict[str, str]:
    return {e.id: e.reason for e in app.delayed.events("celery") if e.event == name}


def test_timeout_buries_what_has_not_begun(open_app: OpenApp) -> None:
    app = open_app(Timeout("1h"))
    send_late(app, "in-time", 59)
    result = send_late(app, "late", 61)
    assert take_all(app) == ["in-time"]
    letter = app.delayed.dead.show("late")
    assert letter.letter.reason == "not started within 1h of its due time"
    assert result.state == "FAILURE"
    # A replay gets a new due time.
    app.delayed.dead.replay(["late"])
    assert take_all(app) == ["late"]


def test_what_has_not_begun_in_time_is_retried(open_app: OpenApp) -> None:
    app = open_app(Timeout("1h"), Backoff([10], retries=1))
    apply(app)
    result = send_late(app, "late", 61, headers={"tenant": "ada"}, priority=3)
    assert take_all(app) == []
    assert result.state == "RETRY"
    info = app.delayed.get("late")
    assert timedelta(seconds=5) < info.remaining <= timedelta(seconds=10)
    assert (info.headers["retries"], info.tenant, info.priority) == (1, "ada", 3)
    assert app.delayed.counts()["celery"].unacked == 0
    assert events(app, "dropped") == {
        "late": "not started within 1h of its due time: it is retried"
    }
    # The retry has the full time again; it is late, too.
    send_late(app, "late", 61, headers={"tenant": "ada"}, retries=1)
    assert take_all(app) == []
    assert result.state == "FAILURE"
    letter = app.delayed.dead.show("late")
    reason = "failed 2 times, at last with NotRun: not started within 1h of its due time"
    assert letter.letter.reason == reason
    assert [(each.attempt, each.worker) for each in letter.failures] == [(2, gethostname())]
    assert (letter.info.headers["retries"], letter.info.tenant) == (0, "ada")


def test_a_retry_that_cannot_be_sent_waits(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = open_app(Timeout("1h"), Backoff([10]))
    apply(app)
    send_late(app, "late", 61)

    def fail(*_: Any, **__: Any) -> None:
        raise OperationalError("no broker")

    with monkeypatch.context() as context:
        context.setattr(Signature, "apply_async", fail)
        assert take_all(app) == []
    info = app.delayed.get("late")
    assert info.headers["retries"] == 0
    assert "its retry cannot be sent: no broker" in info.reason
    let_time_pass(app)
    assert take_all(app) == []
    assert app.delayed.get("late").headers["retries"] == 1


@pytest.mark.parametrize("headers", [{}, {GIVE_UP_HEADER: 1}])
def test_what_cannot_be_read_is_not_retried_without_its_arguments(
    open_app: OpenApp, headers: dict[str, Any]
) -> None:
    app = open_app(Timeout("1h", max_age="1d"), Backoff([10]))
    apply(app)
    send_late(app, "a", 61, args=("secret",), serializer="yaml", headers=headers, retries=1)
    body = app.delayed.get("a").payload["body"]
    app.conf.accept_content = ["json"]
    assert take(app) is None
    assert [*app.delayed.find()] == []
    (letter,) = app.delayed.dead.list()
    assert letter.info.payload["body"] == body
    assert letter.info.payload["content-type"] == "application/x-yaml"


def test_a_task_without_a_strategy_is_buried_beside_others(open_app: OpenApp) -> None:
    app = open_app(Timeout("1h"))

    @app.task(name="other", shared=False, policies=[Backoff(1)])
    def other() -> None: ...

    apply(app)
    send_late(app, "late", 61)
    assert take_all(app) == []
    assert app.delayed.dead.show("late").letter.reason == "not started within 1h of its due time"


def test_timeout_drops(open_app: OpenApp) -> None:
    app = open_app(Timeout(3600, then="drop"))
    result = send_late(app, "late", 61)
    assert take_all(app) == []
    assert result.state == "REVOKED"
    assert app.delayed.get("late") is None


def limits_of(message: Any) -> list[float]:
    limits: list[float] = message.headers["timelimit"]
    return limits


def test_the_rest_of_the_time_is_the_limit(open_app: OpenApp) -> None:
    app = open_app(Timeout("1h", soft="1m"))
    send_late(app, "a", 50)
    hard, soft = limits_of(take(app))
    assert 590 < hard <= 600
    assert hard - soft == pytest.approx(60)
    app.send_task("record", task_id="b", time_limit=7, soft_time_limit=5)
    message = take(app)
    assert limits_of(message) == [7, 5]
    # A retry keeps its headers, which have the limits of the attempt before.
    headers = {"delayed_own_limits": [None, 5], "x": 1}
    app.send_task("record", task_id="c", time_limit=3, headers=headers)
    hard, soft = limits_of(take(app))
    assert (round(hard / 100), soft) == (36, 5)


def start_pool(app: Celery, pool: Any, **limits: float) -> None:
    Policies(SimpleNamespace(app=app, pool_cls=pool, **{**dict.fromkeys(LIMITS), **limits}))


LIMITS = "time_limit", "soft_time_limit"
THREADS = SimpleNamespace(__module__="celery.concurrency.thread")


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeout, "worker_limits", {})


def test_a_shorter_limit_of_the_task_stays(open_app: OpenApp) -> None:
    """Its sender may not know the task, and then the message has no limits."""
    app = open_app(Timeout("1h", soft="1m"))
    start_pool(app, None)

    @app.task(name="limited", shared=False, time_limit=7, soft_time_limit=5)
    def limited() -> None: ...

    app.send_task("limited")
    assert limits_of(take(app)) == [7, 5]
    app.send_task("limited", time_limit=9)
    assert limits_of(take(app)) == [9, 5]


@pytest.mark.parametrize(("pool", "limits"), [(None, [7, 5]), (THREADS, [3600, None])])
def test_a_shorter_limit_of_the_worker_stays(
    pool: Any, limits: list[float | None], open_app: OpenApp
) -> None:
    """With threads it would not end the task, but its unique key."""
    app = open_app(Timeout("1h"))
    start_pool(app, pool, time_limit=7, soft_time_limit=5)
    app.send_task("record")
    hard, soft = limits_of(take(app))
    assert [round(hard), soft] == limits


@pytest.mark.parametrize("pool", ["prefork", "gevent", "eventlet", "threads", "solo"])
def test_a_worker_says_if_its_pool_cannot_end_tasks(
    open_app: OpenApp, caplog: pytest.LogCaptureFixture, pool: str
) -> None:
    module = ALIASES[pool].partition(":")[0]  # importing some of them has side effects
    app, pool_cls = open_app(Timeout("1h")), SimpleNamespace(__module__=module)
    Policies(SimpleNamespace(app=app, pool_cls=pool_cls, time_limit=None, soft_time_limit=None))
    text = f"the pool {pool} cannot end a running task"
    assert (text in caplog.text) == (pool in ("eventlet", "threads", "solo"))


def test_messages_for_now_know_when_they_were_sent(open_app: OpenApp) -> None:
    seen: list[Message] = []

    class Look(Policy):
        def decide(self, message: Message) -> Any:
            seen.append(message)
            return super().decide(message)

    app = open_app(Timeout("1h"), Look())
    before_ms = datetime.now(timezone.utc).timestamp() * 1000 - 1
    app.send_task("record", task_id="a")
    assert take_all(app) == ["a"]
    assert seen[0].due_ms is not None
    assert before_ms <= seen[0].due_ms <= seen[0].now_ms + 1


def test_drop_older(open_app: OpenApp) -> None:
    app = open_app(DropOlder("10m"))
    send_late(app, "old", 11)
    send_late(app, "new", 9)
    assert take_all(app) == ["new"]
    assert events(app, "dropped") == {"old": "older than 10m"}


@pytest.mark.parametrize(
    "policy", [DropOlder("10m"), Timeout("1h"), Timeout("1h", max_age="1h")], ids=repr
)
def test_a_pause_of_the_queue_ends_no_task(policy: Policy, open_app: OpenApp) -> None:
    app = open_app(policy)
    app.delayed.pause("celery")
    send_late(app, "late", 61)
    assert take_all(app) == []
    app.delayed.resume("celery")
    assert take_all(app) == ["late"]


def test_spread(open_app: OpenApp) -> None:
    app = open_app(Spread("1h", after="5m"))
    for n in range(50):
        send_late(app, f"late{n}", 6)
    send_late(app, "in-time", 4)
    assert take_all(app) == ["in-time"]
    left = [info.remaining or timedelta() for info in app.delayed.find()]
    assert len(left) == 50
    assert min(left) < timedelta(minutes=15)
    assert timedelta(minutes=45) < max(left) <= timedelta(hours=1)
    assert {info.reason for info in app.delayed.find()} == {"late, and spread over 1h"}
    let_time_pass(app)
    assert len(take_all(app)) == 50


@pytest.mark.parametrize("by", ["customer", lambda message: message.kwargs["customer"]])
def test_latest(open_app: OpenApp, by: Any) -> None:
    app = open_app(Latest(by=by, after="5m"))
    for minutes, customer in ((9, "ada"), (8, "bob"), (7, "ada"), (6, "ada"), (6, "eve")):
        send_late(app, f"{customer}{minutes}", minutes, kwargs={"customer": customer})
    send_late(app, "bob0", 0, kwargs={"customer": "bob"})
    assert take_all(app) == ["bob0"]
    let_time_pass(app)
    assert sorted(take_all(app)) == ["ada6", "eve6"]
    reason = "a later one with the key {} runs instead"
    assert events(app, "dropped") == {
        "ada9": reason.format("ada"),
        "ada7": reason.format("ada"),
        "bob8": reason.format("bob"),
    }


@pytest.mark.parametrize("by", ["customer", lambda message: message.kwargs.get("customer")])
def test_messages_without_the_key_are_not_alike(open_app: OpenApp, by: Any) -> None:
    app = open_app(Latest(by=by, after="5m"))
    for minutes, customer in ((9, "ada"), (8, "bob")):
        send_late(app, customer, minutes, args=[customer])
    assert take_all(app) == ["ada", "bob"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Timeout("soon"), "Timeout: 'soon' is not a length of time"),
        (lambda: Timeout(0), "0 is not"),
        (lambda: Timeout(""), "'' is not"),
        (lambda: Timeout("1h", then="cry"), "'bury' or 'drop'"),
        (lambda: Timeout("1h", soft="2h"), "soft must be shorter"),
        (lambda: DropOlder(None), "DropOlder: None is not"),
        (lambda: Spread("1x"), "'1x'"),
        (lambda: Latest(by=""), "name of an argument"),
    ],
)
def test_what_cannot_be_meant(make: Callable[[], Policy], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make()
