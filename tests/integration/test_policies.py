"""Decisions between delivery and execution, as a channel carries them out."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_ext.policies import Bury, Delay, Drop, Message, Policy, PolicyError, Run, Window
from kombu_delayed.consumer.policy import apply
from kombu_delayed.consumer.policy.apply import FIRST_ERROR_MS
from kombu_delayed.errors import OptionError
from kombu_delayed.inspection.doctor import examine_queues
from tests.kit.inbox import Inbox
from tests.kit.policed import OpenApp, let_time_pass, take
from tests.kit.servers import Server
from tests.kit.state import entry
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until

HOUR_MS = 3_600_000


class Says(Policy):
    """Gives a preset answer, and records the messages it was asked about."""

    def __init__(self, answer: Callable[[Message], Any]) -> None:
        self.answer = answer
        self.asked: list[Message] = []

    def decide(self, message: Message) -> Any:
        self.asked.append(message)
        return self.answer(message)


def events(app: Celery) -> list[tuple[str, str]]:
    return [(each.event, each.reason) for each in app.delayed.events("celery")]


@pytest.mark.parametrize("no_ack", [False, True])
def test_delay(open_app: OpenApp, no_ack: bool) -> None:
    policy = Says(lambda message: Delay(message.now_ms + HOUR_MS, "} not yet {", "seen"))
    app = open_app(policy)
    eta = datetime.now(timezone.utc) - timedelta(minutes=5)
    app.send_task("record", ["x"], task_id="a", eta=eta)
    assert take(app, no_ack) is None
    for fix in (True, False):
        assert examine_queues(app.delayed.store, ["celery"], fix=fix, patience_seconds=0) == []
    info = app.delayed.get("a")
    assert (info.state, info.reason, info.task) == ("delayed", "} not yet {", "record")
    assert timedelta(minutes=59) < info.remaining <= timedelta(hours=1)
    assert info.as_dict()["reason"] == "} not yet {"
    if not no_ack:
        assert ("scheduled", "} not yet {") in events(app)
    # The policy is asked again with the marks it left, and gets the very same message.
    policy.answer = lambda message: Run()
    app.delayed.reschedule("a", countdown=0)
    assert take(app, no_ack).headers["id"] == "a"
    assert policy.asked[0].args == ["x"]


def test_marks_and_the_first_due_time_stay(open_app: OpenApp) -> None:
    policy = Says(lambda m: Delay(m.now_ms, f"wait {len(m.marks)}", f"m{len(m.marks)}"))
    app = open_app(policy)
    due_ms = int(time.time() * 1000) - 5_000
    eta = datetime.fromtimestamp(due_ms / 1000, timezone.utc)
    app.send_task("record", task_id="a", eta=eta, countdown=None)

    def asked_often() -> bool:
        take(app)
        return len(policy.asked) >= 3

    wait_until(asked_often, "it is asked again")
    first, second, third, *_ = policy.asked
    assert (first.marks, second.marks, third.marks) == ((), ("m0",), ("m0", "m1"))
    assert second.reason == "wait 0"
    # It was published at once, without a due time; from now on the time is known.
    assert first.due_ms is None
    policy.answer = lambda message: Run()
    wait_until(lambda: take(app), "it runs")
    assert app.delayed.get("a") is None


def test_delayed_messages_keep_their_first_due_time(open_app: OpenApp) -> None:
    policy = Says(lambda message: Delay(message.now_ms + HOUR_MS, "later"))
    app = open_app(policy)
    app.send_task("record", task_id="a", countdown=0.3)
    info = app.delayed.get("a")
    wait_until(lambda: take(app) or policy.asked, "it is due")
    moved = app.delayed.get("a")
    assert moved.first_eta == info.eta
    assert policy.asked[0].due_ms == info.due_ms
    assert policy.asked[0].late_ms >= 0
    # Rescheduling sets a new first due time.
    app.delayed.reschedule("a", countdown=60)
    again = app.delayed.get("a")
    assert (again.first_eta, again.reason) == (None, "")


@pytest.mark.parametrize("no_ack", [False, True])
def test_drop(open_app: OpenApp, client: redis.Redis, no_ack: bool) -> None:
    app = open_app(Says(lambda message: Drop("too old")))
    result = app.send_task("record", task_id="a")
    assert take(app, no_ack) is None
    assert app.delayed.get("a") is None
    assert not [key for key in client.keys("*unacked*") if client.type(key) == b"hash"]
    assert events(app)[-1] == ("dropped", "too old")
    assert result.state == "REVOKED"
    assert str(result.result) == "too old"


@pytest.mark.parametrize("no_ack", [False, True])
def test_bury(open_app: OpenApp, no_ack: bool) -> None:
    policy = Says(lambda message: Bury("no good"))
    app = open_app(policy)
    result = app.send_task("record", task_id="a")
    assert take(app, no_ack) is None
    assert app.delayed.dead.show("a").letter.reason == "no good"
    assert events(app)[-1] == ("buried", "no good")
    assert result.state == "FAILURE"
    assert "no good" in str(result.result)
    # A replay starts again without earlier decisions.
    at = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(hours=2)
    app.delayed.dead.replay(["a"], at)
    info = app.delayed.get("a")
    assert (info.eta, info.first_eta, info.reason) == (at, at, "")
    policy.answer = lambda message: Run()
    let_time_pass(app)
    assert take(app, no_ack).headers["id"] == "a"
    assert policy.asked[-1].reason == ""


@pytest.mark.parametrize(
    "wrong",
    [OSError("no such file"), OSError("half a pair: \ud83d"), None, "soon", Delay("soon", "x")],  # type: ignore[arg-type]
)
def test_an_error_neither_loses_nor_loops(
    open_app: OpenApp, wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", apply.logger.name)  # test reports take no half of a pair

    def fail(message: Message) -> Any:
        if isinstance(wrong, OSError):
            raise wrong
        return wrong

    policy = Says(fail)
    app = open_app(policy, delayed_max_deliveries=3)
    app.send_task("record", task_id="a")
    for count in range(1, 3):
        before_ms = time.time() * 1000
        assert take(app) is None
        info = app.delayed.get("a")
        assert info.reason.startswith("its policies have failed: ")
        assert info.due_ms >= before_ms + FIRST_ERROR_MS * 2 ** (count - 1) - 50
        let_time_pass(app)
    assert take(app) is None
    letter = app.delayed.dead.show("a")
    assert letter.letter.reason.startswith("3 times its policies have failed: ")
    assert len(policy.asked) == 3


@pytest.mark.parametrize("decision", [Drop, Bury, lambda reason: Delay(10**400, reason, reason)])
def test_any_reason_will_do(open_app: OpenApp, decision: Callable[[Any], Any]) -> None:
    for reason in (None, "\ud800", 7):
        app = open_app(Says(lambda message, reason=reason: decision(reason)))  # type: ignore[misc]
        app.send_task("record", task_id="a")
        assert take(app) is None
        assert events(app)[-1][1] in ("None", "\\ud800", "7")


def test_a_consumer_that_waits(open_app: OpenApp) -> None:
    delayed_once: set[str] = set()

    def once(message: Message) -> Any:
        if message.id in delayed_once:
            return Run({"x-passed": 1})
        delayed_once.add(message.id)
        return Delay(message.now_ms + 100, "a moment")

    app = open_app(Says(once))
    for n in range(5):
        app.send_task("record", [n], task_id=str(n))
    with app.connection_for_read() as connection:
        inbox = Inbox(connection.default_channel, app.amqp.queues["celery"])
        inbox.receive(5)
        assert {message.headers["id"] for message in inbox.messages} == set("01234")
        assert all(message.headers["x-passed"] == 1 for message in inbox.messages)
        inbox.drain(0.1)
        assert len(inbox.messages) == 5


def test_shards_have_the_policies_of_their_queue(open_app: OpenApp) -> None:
    policy = Says(lambda message: Drop("too old"))
    app = open_app(policy, delayed_shards=4)
    for n in range(12):
        app.send_task("record", task_id=str(n))
    assert take(app) is None
    assert {message.id for message in policy.asked} == {str(n) for n in range(12)}
    assert {message.queue for message in policy.asked} == {"celery"}


def test_the_first_that_does_not_run_decides(open_app: OpenApp) -> None:
    first, last = Says(lambda message: Drop("first")), Says(lambda message: Drop("second"))
    app = open_app(Says(lambda message: Run({"x-one": 1})), first, last)
    app.send_task("record", task_id="a")
    assert take(app) is None
    assert events(app)[-1] == ("dropped", "first")
    assert last.asked == []


def test_policies_of_a_task(open_app: OpenApp) -> None:
    app = open_app(Says(lambda message: Run({"x-queue": 1})))
    policy = Says(lambda message: Drop("not this task") if message.args == [1] else Run())

    @app.task(name="only_this", shared=False, policies=[policy])
    def only_this(n: int) -> None: ...

    only_this.delay(1)
    only_this.delay(2)
    app.send_task("record", [1])
    assert take(app).headers["task"] == "only_this"
    assert take(app).headers["task"] == "record"
    assert take(app) is None
    assert len(policy.asked) == 2


def lose_first(monkeypatch: pytest.MonkeyPatch, store: Any, move: str, is_done: bool) -> None:
    """Break the connection at the first call of a move: before the server does it, or after."""
    ask, calls = store.ask, []

    def losing(name: str, *args: Any, **given: Any) -> Any:
        if name != move or calls:
            return ask(name, *args, **given)
        calls.append(name)
        if is_done:
            ask(name, *args, **given)
        raise redis.exceptions.ConnectionError("its answer is lost")

    monkeypatch.setattr(store, "ask", losing)


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize(
    ("move", "first"),
    [
        ("park", lambda message: Delay(message.now_ms + HOUR_MS, "paused")),
        ("drop", lambda message: Drop("too old")),
        ("bury", lambda message: Bury("not for us")),
    ],
)
def test_a_decision_whose_answer_was_lost(
    open_app: OpenApp,
    monkeypatch: pytest.MonkeyPatch,
    move: str,
    first: Callable[[Message], Any],
    is_done: bool,
) -> None:
    """When the connection is back, the policy decides otherwise, as after the end of a pause."""
    decisions = [first]
    app = open_app(Says(lambda m: decisions.pop()(m) if m.args == ["x"] and decisions else Run()))
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        inbox = Inbox(channel, app.amqp.queues["celery"])
        lose_first(monkeypatch, channel.store, move, is_done)
        app.send_task("record", ["x"], task_id="a")
        wait_until(lambda: inbox.drain(0.05) is not None and not decisions, "it was decided")
        app.send_task("record", ["y"], task_id="b")
        inbox.receive(1 if is_done else 2)
        ran = [message.headers["id"] for message in inbox.messages]
        assert ran == (["b"] if is_done else ["a", "b"])
        size = channel.store.size("celery")
        assert (size.ready, size.delayed) == (0, int(is_done and move == "park"))
        assert len([*app.delayed.dead.list("celery")]) == int(is_done and move == "bury")


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("q", "takes a dict of queues, not 'q'"),
        ({"q": Window("05:00-07:00")}, r"takes a list of policies for a queue, not Window\("),
        ({"q": ["late"]}, "queue 'q': 'late' is not a policy: use those of celery_ext.policies"),
        (
            {"q": [Window("05:00-07:00"), Window("07:00-08:00")]},
            "queue 'q': .* are never open together",
        ),
    ],
)
def test_errors_name_the_queue(server: Server, policies: Any, message: str) -> None:
    app = make_app(Settings(f"delayed+{server.url}", None, {"delayed_policies": policies}))
    with pytest.raises(OptionError, match=message):
        app.send_task("record")


def test_windows_of_a_queue_and_of_a_task_that_are_never_open_together(open_app: OpenApp) -> None:
    app = open_app(Window("05:00-07:00"))

    @app.task(name="evening", policies=[Window("20:00-22:00")])
    def evening() -> None: ...

    with pytest.raises(PolicyError, match=r"evening in queue 'celery': .* never open together"):
        evening.delay()
    assert app.delayed.store.size("celery").delayed == 0


def test_backup_and_restore_keep_waits_and_histories(open_app: OpenApp, tmp_path: Path) -> None:
    app = open_app(Says(lambda m: Delay(m.now_ms + HOUR_MS, "later", "x")))
    app.send_task("record", task_id="a")
    assert take(app) is None
    store = app.delayed.store
    store.publish("celery", [entry("c")])
    store.bury("celery", "w", [(0, "c", "given up", entry("c").record.encode())], '[{"x": 1}]')
    before = app.delayed.get("a")
    app.delayed.backup(tmp_path / "file")
    store.client.flushdb()
    app.delayed.restore(tmp_path / "file")
    again = app.delayed.get("a")
    assert (again.reason, again.due_ms, again.message) == ("later", before.due_ms, before.message)
    letter = app.delayed.dead.show("c")
    assert (letter.letter.failures, letter.failures) == ('[{"x": 1}]', [])
    assert app.delayed.store.size("celery").delayed == 1
