"""A task or a tenant is paused, and the rest of its queue continues."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from kombu import Queue

from celery_ext.control.policies import pauses
from celery_ext.errors import QueryError
from celery_ext.policies import Fair, Limit
from celery_ext.policies.rules import Rules
from kombu_delayed.message import clock
from tests.kit.extended import Bench
from tests.kit.policed import OpenApp, let_time_pass, take
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_the_rest_goes_on(pool: str, bench: Bench) -> None:
    delayed = bench.app.delayed

    def send(id: str, tenant: str, name: str = "record", **options: object) -> None:
        bench.app.send_task(name, task_id=id, headers={"tenant": tenant}, **options)

    with bench.worker(pool=pool, concurrency=1):
        send("before", "ann")
        bench.ledger.wait_for(1)
        pause = delayed.pause("celery", tenant="ann", why="too many", by="bob")
        assert [dataclasses.asdict(each) for each in delayed.pauses()] == [
            dataclasses.asdict(pause)
        ]
        send("now", "ann")
        send("soon", "ann", countdown=0.01)
        send("later", "ann", countdown=3600)
        send("other", "cid")
        bench.ledger.wait_for(2)

        def reasons() -> set[str]:
            found = [delayed.get(id) for id in ("now", "soon")]
            return {each.reason for each in found if each is not None}

        reason = {"paused: tenant ann, by bob: too many"}
        wait_until(lambda: reasons() == reason, "both are kept back", 30)
        assert delayed.resume("celery", tenant="ann")
        bench.ledger.wait_for(4)
        assert not delayed.resume("celery", tenant="ann")
        assert delayed.pauses() == []
        assert bench.ledger.runs() == dict.fromkeys(("before", "other", "now", "soon"), 1)
        assert bench.backlog() == {"later"}


@pytest.mark.parametrize("then", ["", "resume", "drop"])
def test_a_queue_in_which_nothing_is_declared_keeps_the_policies_of_its_program(
    open_app: OpenApp, then: str
) -> None:
    app = open_app(Limit(concurrency=1))
    app.conf.task_queues = [Queue("celery", expires=3600)]
    for id in ("first", "second"):
        app.send_task("record", task_id=id)
    app.delayed.pause("celery", task="other")
    if then == "resume":
        assert app.delayed.resume("celery", task="other")
    if then == "drop":
        assert not app.delayed.policies.drop("celery")
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        assert channel.basic_get("celery").headers["id"] == "first"
        assert channel.basic_get("celery") is None


@pytest.mark.parametrize("pauses", [False, True])
def test_policies_that_are_applied_leave_no_mark(pauses: bool, open_app: OpenApp) -> None:
    app = open_app(Limit(concurrency=1))
    if pauses:
        app.delayed.pause("celery", task="other")
    app.delayed.policies.apply("celery")
    assert "undeclared" not in app.delayed.store.policies.read("celery").text


def test_policies_hold_beside_the_mark_that_a_worker_of_an_earlier_version_leaves() -> None:
    text = '{"paused":[],"queue":[{"Limit":{"concurrency":1}}],"undeclared":true}'
    rules = Rules({})
    rules.follow("celery", text)
    assert rules.gate("celery") is not None


def test_a_worker_declares_policies_beside_the_pauses_of_parts() -> None:
    rules = Rules({"celery": [Limit(concurrency=1)]})
    found = json.loads(rules.declared("celery", '{"paused":[],"undeclared":true}'))
    assert found == {"paused": [], "queue": [{"Limit": {"concurrency": 1}}]}


def test_a_task_by_its_name_until_a_time(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = open_app(Fair(), Limit(concurrency=1))
    for name in ("mail.send", "mail.read", "sms.send"):
        app.send_task(name, task_id=name)
    delayed = app.delayed
    delayed.pause("celery", task="mail.*", for_="1h")
    delayed.pause("celery", task="mail.*", for_="2h", why="longer")
    (pause,) = delayed.pauses("celery")
    assert (pause.task, pause.tenant, pause.why) == ("mail.*", None, "longer")
    message = take(app)
    assert message.headers["id"] == "sms.send"
    assert take(app) is None
    let_time_pass(app)
    assert take(app) is None  # it was looked at again
    monkeypatch.setattr(clock, "ahead_ms", 7_300_000)
    let_time_pass(app)
    assert {take(app).headers["id"] for _ in range(2)} == {"mail.send", "mail.read"}


@pytest.mark.parametrize("before", [None, "2h"])
def test_a_pause_that_is_shortened(
    before: str | None, open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that the longer pause has put back run at the end of the shorter one."""
    monkeypatch.setattr(pauses, "LATE_SECONDS", 0)
    app = open_app(Limit(concurrency=1))
    app.send_task("mail.send", task_id="one", headers={"tenant": "ann"})
    app.delayed.pause("celery", tenant="ann", for_=before)
    assert take(app) is None
    app.delayed.pause("celery", tenant="ann", for_="1m")
    assert take(app) is None
    waits = app.delayed.get("one")
    assert waits is not None
    assert waits.remaining is not None
    assert 0 < waits.remaining.total_seconds() <= 60


def test_it_takes_nothing_of_the_rate_of_others(open_app: OpenApp) -> None:
    app = open_app(Limit(rate="1/h"))
    app.delayed.policies.apply("celery")
    app.delayed.pause("celery", tenant="ann")
    for n in range(3):
        app.send_task("record", task_id=f"ann{n}", headers={"tenant": "ann"})
    for n in range(2):
        app.send_task("record", task_id=f"bob{n}", headers={"tenant": "bob"})
    assert take(app).headers["id"] == "bob0"
    assert take(app) is None


def test_its_end_is_told_by_the_clock_of_the_server(open_app: OpenApp) -> None:
    delayed = open_app(Fair()).delayed
    delayed.store.now = "+600000"
    pause = delayed.pause("celery", tenant="ann", for_="3m")
    assert delayed.pauses() == [pause]
    delayed.store.now = "+800000"
    assert delayed.pauses() == []


def test_declaring_and_dropping_policies_ends_no_pause(open_app: OpenApp) -> None:
    app = open_app(Limit(concurrency=1))
    delayed = app.delayed
    app.send_task("mail.send")
    delayed.pause("celery", task="mail.send", tenant="ann")
    before = delayed.pauses()
    delayed.policies.apply("celery")
    assert delayed.policies.drop("celery")
    assert delayed.pauses() == before
    assert not delayed.resume("celery", task="mail.send")
    assert delayed.resume("celery", task="mail.send", tenant="ann")


def test_the_end_of_a_pause_leaves_no_policies(open_app: OpenApp) -> None:
    delayed = open_app().delayed
    key = delayed.store.keys("other").policies
    delayed.app.send_task("mail.send", queue="other")
    assert not delayed.resume("other", tenant="ann")
    assert not delayed.store.client.exists(key)
    delayed.pause("other", tenant="ann")
    assert delayed.policies("other") == []
    assert delayed.resume("other", tenant="ann")
    assert delayed.policies("other") == []


def test_a_queue_that_nobody_knows(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="there is no queue 'mial'"):
        bench.app.delayed.pause("mial", task="x")


@pytest.mark.parametrize("part", [{"task": ""}, {"tenant": ""}, {"task": "mail", "tenant": ""}])
def test_an_empty_name_is_no_part(part: dict[str, str], open_app: OpenApp) -> None:
    delayed = open_app().delayed
    delayed.app.send_task("mail.send")
    delayed.pause("celery")
    before = delayed.pauses()
    for change in (delayed.pause, delayed.resume):
        with pytest.raises(QueryError, match="name of a task or a tenant is empty"):
            change("celery", **part)
    assert delayed.pauses() == before
