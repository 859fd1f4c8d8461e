"""Policies sent with a single message come before those of its task and its queue."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, states
from kombu import Connection, Producer

from celery_ext.policies import (
    Backoff,
    Delay,
    DropOlder,
    Fair,
    Limit,
    LimitUse,
    Policy,
    PolicyError,
    Spread,
    Timeout,
    Window,
)
from celery_ext.policies.declared import DeclaredPolicies, instead_of
from celery_ext.policies.of_message import KINDS, policies_in
from celery_ext.policies.retry.strategies import GIVE_UP_HEADER
from celery_ext.policies.steps import apply
from celery_ext.tasks.times import to_ms
from kombu_delayed.consumer.policy.of_message import HEADER
from kombu_delayed.errors import OptionError
from kombu_delayed.inspection.gate_usage import slots_in_use
from tests.kit.extended import Bench
from tests.kit.policed import OpenApp, let_time_pass, take
from tests.kit.servers import Server
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough

HOUR_MS = 3_600_000
NIGHT = Window("01:00-02:00", tz="Europe/Berlin", except_dates=["2026-12-24"])
EACH: list[Policy] = [
    Backoff(10, retries=2, max_age="1d"),
    DropOlder("6h"),
    LimitUse("host", key="a", weight=3),
    LimitUse(critical=True),
    Spread("30m", after="5m"),
    Timeout("1h", soft="5m", max_age="1d"),
    NIGHT,
]


class Mine(Policy):
    def decide(self, message: Any) -> Delay:
        return Delay(0, "mine")


def header(app: Celery, id: str) -> Any:
    return app.delayed.get(id).headers.get(HEADER)


def test_all_kinds_come_back_as_they_were(open_app: OpenApp) -> None:
    app = open_app()
    app.send_task("record", task_id="a", countdown=60, policies=EACH)
    app.send_task("record", task_id="b", countdown=60, policies=[])
    assert {type(each) for each in EACH} == set(KINDS)
    assert [*map(repr, policies_in(app.delayed.get("a").headers))] == [*map(repr, EACH)]
    assert header(app, "b") is None
    assert "policies" not in app.delayed.get("a").payload["properties"]


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ([Mine()], "takes Backoff, DropOlder, .* and not Mine.*declare that for its task"),
        ([Fair()], "not Fair"),
        ([Limit(concurrency=1)], "not Limit"),
        ([lambda message: True], "is not a policy"),
        (Timeout("1h"), "policies are a list"),
        ([{"Sooner": {}}], "no policy 'Sooner' in this version"),
        ([{"Timeout": {"until": "1h"}}], "Timeout: .*until"),
        ([{"Timeout": {"after": "soon"}}], "soon"),
        ([Window("01:00-02:00"), Window("03:00-04:00")], "never open together"),
        ([LimitUse(weight=2), LimitUse(key="a")], "one LimitUse"),
    ],
)
def test_what_cannot_be_sent(open_app: OpenApp, policies: Any, message: str) -> None:
    app = open_app()
    with pytest.raises(PolicyError, match=message):
        app.send_task("record", policies=policies, countdown=60)
    assert app.delayed.counts("celery")["celery"].delayed == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_age": "1d"}, "max_age=… is no option of a message"),
        ({"critical": True}, "critical=…"),
        ({"timeout": "1h"}, "timeout='1h' is not a number"),
    ],
)
def test_stray_options(open_app: OpenApp, options: dict[str, Any], message: str) -> None:
    app = open_app()
    with pytest.raises(OptionError, match=message):
        app.send_task("record", **options)
    app.send_task("record", timeout=5, countdown=60, shadow="x")
    assert app.delayed.counts("celery")["celery"].delayed == 1


@pytest.mark.parametrize(
    "given", [{}, {"key": "a", "critical": True}, {"weight": -1}, {"key": 3}, {"limit": 1}]
)
def test_uses_that_cannot_be_meant(given: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        LimitUse(**given)
    with pytest.raises(PolicyError, match="is for single messages"):
        DeclaredPolicies({"celery": [LimitUse(weight=2)]})


def test_its_own_take_the_place_of_others_of_their_kind() -> None:
    hour, day, soon, late, drop = (
        Timeout("1h"),
        Timeout("24h"),
        Backoff(1),
        Backoff(60),
        DropOlder(1),
    )
    declared = DeclaredPolicies({"*": [day, soon], "celery": [drop]})
    assert instead_of((hour,), declared.of("celery", ())) == (hour, soon, drop)
    assert instead_of((late,), declared.of("celery", ())) == (late, day, drop)
    assert declared.strategy("celery", (), (hour, late)) is late
    assert declared.strategy("celery", (), (hour,)) is soon


def test_a_window_moves_the_due_time(open_app: OpenApp) -> None:
    app = open_app(Window("00:00-24:00"))
    app.send_task("record", task_id="a", eta="2040-03-09T20:00:00+00:00", policies=[NIGHT])
    app.send_task("record", task_id="b", eta="2040-03-09T20:00:00+00:00")
    assert app.delayed.get("a").eta.isoformat() == "2040-03-10T00:00:00+00:00"
    assert app.delayed.get("b").eta.isoformat() == "2040-03-09T20:00:00+00:00"


def test_a_backup_has_them(open_app: OpenApp, tmp_path: Path) -> None:
    app = open_app()
    app.send_task("record", task_id="a", countdown=3600, policies=EACH)
    before = header(app, "a")
    app.delayed.backup(tmp_path / "file", progress=None)
    assert app.delayed.cancel("a")
    app.delayed.restore(tmp_path / "file", progress=None)
    assert header(app, "a") == before


def test_rows_of_a_bulk(open_app: OpenApp) -> None:
    app = open_app()
    eta = "2040-03-09T20:00:00+00:00"
    rows = [
        ("record", (), {}, eta, {"task_id": str(n), "policies": [NIGHT] if n % 2 else []})
        for n in range(6)
    ]
    report = app.delayed.schedule_many(rows, progress=None)
    assert report.delayed == 6
    for n in range(6):
        assert app.delayed.get(str(n)).eta.hour == (0 if n % 2 else 20)


SEND = """
options = {"headers": {"eta": "2020-01-01T00:00:00"}, "routing_key": "plain"}
producer = Producer(channel)
producer.publish("a", policies=[{"DropOlder": {"than": "1h"}}], **options)
producer.publish("b", **options)
"""
TAKE = """
first, second = channel.basic_get("plain"), channel.basic_get("plain")
print(first.payload, second)
first.ack()
"""


def test_programs_that_import_no_policies_heed_them(server: Server) -> None:
    for rest, printed in ((SEND, ""), (TAKE, "b None")):
        code = f"""
import sys
from kombu import Connection, Producer
channel = Connection("delayed+{server.url}").default_channel
assert "celery_ext.policies" not in sys.modules
{rest}
assert "celery_ext.policies" in sys.modules
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr, done.returncode) == (printed, "", 0)


def test_messages_of_plain_kombu(connection: Connection) -> None:
    channel = connection.default_channel
    producer = Producer(channel, routing_key="plain")
    queue = connection.SimpleQueue("plain")
    old = {"eta": "2020-01-01T00:00:00"}
    producer.publish("a", headers=old, policies=[DropOlder("1h")])
    producer.publish("b", headers=old)
    assert queue.get(timeout=30).payload == "b"
    assert channel.basic_get("plain") is None
    queue.close()


def test_from_a_newer_version_it_waits(open_app: OpenApp, caplog: Any) -> None:
    app = open_app(delayed_max_deliveries=3)
    app.send_task("record", task_id="a", policies=[Timeout("1h")])
    store = app.delayed.store
    text = store.run("RPOP", "celery")
    store.run("LPUSH", "celery", text.replace(b"Timeout", b"Sooner"))
    assert take(app) is None
    info = app.delayed.get("a")
    assert "there is no policy 'Sooner' in this version" in info.reason
    assert "Sooner" in caplog.text
    for _ in range(2):
        let_time_pass(app)
        assert take(app) is None
    assert "Sooner" in app.delayed.dead.show("a").letter.reason


def test_what_it_takes_of_limits(open_app: OpenApp) -> None:
    app = open_app(
        Limit(concurrency=5, by="task", name="all"), Limit(concurrency=5, by="who", name="host")
    )
    sent = {
        "plain": [],
        "named": [LimitUse("host", key="a", weight=3)],
        "each": [LimitUse(key="b", weight=0), LimitUse("all", weight=2)],
        "free": [LimitUse(critical=True)],
    }
    for id, policies in sent.items():
        app.send_task("record", task_id=id, headers={"who": "z"}, policies=policies)
    with app.connection_for_read() as connection:
        found = [connection.default_channel.basic_get("celery").headers["id"] for _ in sent]
        assert sorted(found) == sorted(sent)
        slots = slots_in_use(app.delayed.store, "celery")
        connection.default_channel.close()
    assert slots == {"all:record": 2, "all:b": 2, "host:z": 1, "host:a": 3}


@pytest.mark.parametrize("limit", ["provider", "global/provider"])
def test_a_limit_by_either_of_its_names(limit: str, open_app: OpenApp) -> None:
    app = open_app(Limit(concurrency=2, scope="global", name="provider"))
    for _ in range(2):
        app.send_task("record", policies=[LimitUse(limit, weight=2)])
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        assert channel.basic_get("celery") is not None
        assert channel.basic_get("celery") is None
        channel.close()


def test_a_limit_that_there_is_not(open_app: OpenApp, caplog: pytest.LogCaptureFixture) -> None:
    app = open_app(Limit(concurrency=2, by="host"))
    for _ in range(2):
        app.send_task("record", headers={"host": "a"}, policies=[LimitUse("hots", weight=2)])
    assert take(app) is not None
    (told,) = [each.getMessage() for each in caplog.records if "hots" in each.getMessage()]
    assert "changes nothing: the limits of queue and task are 'host'" in told


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_that_declares_none_follows_its_strategy(bench: Bench, pool: str) -> None:
    app = bench.app
    with bench.worker(pool=pool):
        result = app.send_task("add", ("a", 1), policies=[Backoff([0.01, 0.02])])
        other = app.send_task("add", ("a", 1))
        assert wait_until(lambda: [*app.delayed.dead.list()], "it is a dead letter")
        wait_until(lambda: other.state == states.FAILURE, "the other one has failed")
    (letter,) = app.delayed.dead.list()
    assert (letter.info.id, [each.attempt for each in letter.failures]) == (result.id, [1, 2, 3])
    assert policies_in(letter.info.headers)[0].retries == 2
    assert app.delayed.dead.replay(at="2040-01-01") == 1
    assert json.loads(header(app, result.id)) == [{"Backoff": {"seconds": [0.01, 0.02]}}]


@pytest.mark.parametrize("as_data", [False, True])
def test_a_part_of_a_chain(bench: Bench, as_data: bool) -> None:
    app = bench.app
    add = app.signature("add")
    policies: list[Any] = [{"Timeout": {"after": "2h"}}] if as_data else [Timeout("2h")]
    last = add.clone((1,)).set(policies=policies, countdown=3600)
    chain(add.clone((1, 2)), last).apply_async()
    with bench.worker():
        wait_until(lambda: [*app.delayed.find()], "the last part waits")
    (info,) = app.delayed.find()
    assert repr(policies_in(info.headers)) == repr((Timeout("2h"),))


def test_the_time_over_all_attempts(open_app: OpenApp) -> None:
    app = open_app()
    apply(app)
    old = datetime.now(timezone.utc) - timedelta(minutes=50)
    policies = [Timeout("1h", max_age="2h"), Backoff([3000, 3000, 3000])]
    app.send_task("add", ("a", 1), task_id="a", eta=old, policies=policies)
    headers = take(app).headers
    end_ms = headers[GIVE_UP_HEADER]
    assert end_ms == to_ms("eta", old) + 2 * HOUR_MS
    assert 9 * 60 < headers["timelimit"][0] <= 10 * 60
    for age, hours in (("retried", 0), ("over", -1)):
        at = datetime.now(timezone.utc) - timedelta(minutes=1)
        mine = {**headers, GIVE_UP_HEADER: end_ms + hours * 2 * HOUR_MS, "retries": 1}
        kept = {name: mine[name] for name in (HEADER, GIVE_UP_HEADER, "delayed_own_limits")}
        app.send_task("add", ("a", 1), task_id=age, eta=at, headers=kept, retries=1)
    found = take(app)
    assert (found.headers["id"], found.headers[GIVE_UP_HEADER]) == ("retried", end_ms)
    assert 57 * 60 < found.headers["timelimit"][0] <= 59 * 60
    assert take(app) is None
    (letter,) = app.delayed.dead.list()
    assert letter.info.id == "over"
    assert "its time over all attempts ends" in letter.letter.reason
    assert GIVE_UP_HEADER not in letter.info.headers


@pytest.mark.parametrize("then", ["bury", "drop"])
def test_the_time_over_all_attempts_without_a_strategy(open_app: OpenApp, then: str) -> None:
    app = open_app(Timeout("1h", max_age="2h", then=then))
    apply(app)
    kept = {GIVE_UP_HEADER: 1_000_000}
    app.send_task("record", task_id="a", headers=kept, retries=1)
    assert take(app) is None
    if then == "bury":
        (letter,) = app.delayed.dead.list()
        assert letter.letter.reason == (
            "not done within 2h of when it was first due, over all attempts"
        )
        app.delayed.dead.replay()
        assert take(app).headers["id"] == "a"
    else:
        assert not [*app.delayed.dead.list()]
        assert app.AsyncResult("a").state == states.REVOKED


def test_a_retry_is_not_later_than_its_time_ends(bench: Bench) -> None:
    app = bench.app
    policies = [Timeout("1h", max_age="1h"), Backoff([0.01, 7200])]
    with bench.worker():
        app.send_task("add", ("a", 1), policies=policies)
        assert wait_until(lambda: [*app.delayed.dead.list()], "it is a dead letter")
    (letter,) = app.delayed.dead.list()
    assert [each.attempt for each in letter.failures] == [1, 2]
    assert letter.letter.reason.startswith("its time over all attempts ends, at last TypeError")
