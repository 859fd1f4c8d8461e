"""Events that must not harm a queue whose policies are in Redis."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Consumer, Queue

from celery_ext.policies import HandOver, Limit, Policy, Timeout, Window
from celery_ext.policies.rules import Rules
from celery_ext.policies.written import restored, written
from kombu_delayed.store.policies.declared import PolicyRecord
from tests.kit.policed import OpenApp
from tests.kit.sentinels import Group
from tests.kit.servers import Server
from tests.kit.workers import ROOT

pytestmark = pytest.mark.thorough

Open = Callable[[Celery], Connection]


@pytest.fixture
def consume() -> Any:
    """Consume the queue of an app; returns its connection, for `drain`."""
    with ExitStack() as stack:

        def consume_of(app: Celery, found: list[Any] | None = None, ack: bool = True) -> Connection:
            connection = stack.enter_context(app.connection_for_read())

            def on_message(message: Any) -> None:
                if found is not None:
                    found.append(message)
                if ack:
                    message.ack()

            stack.enter_context(Consumer(connection, [Queue("celery")], on_message=on_message))
            return drain(connection)

        yield consume_of


def drain(connection: Connection, times: int = 1) -> Connection:
    for _ in range(times):
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.1)
    return connection


def lose(app: Celery) -> None:
    store = app.delayed.store
    assert store.run("DEL", store.keys("celery").policies) == 1


def header(name: str) -> Callable[[Any], Any]:
    return lambda message: message.headers.get(name)


class Not(Policy):
    def __init__(self, number: int) -> None:
        self.number = number


@dataclass
class Healthy(Policy):
    client: object = field(default_factory=object)


@dataclass(frozen=True)
class Frozen(Policy):
    number: int = 1


@dataclass
class Key:
    header: str

    def __call__(self, message: Any) -> Any:
        return message.headers.get(self.header)


def test_policies_that_look_alike_stay_where_they_are() -> None:
    to = [HandOver("amqp://h/", exchange="x", routing_key=each) for each in ("eu", "us")]
    for one, other in [(Not(1), Not(2)), to]:
        rules = Rules({"a": [one], "b": [other]})
        for queue, policy in (("a", one), ("b", other)):
            rules.follow(queue, rules.declared(queue))
            assert rules.policies(queue, "t") == (policy,)


def test_processes_with_the_same_code_go_by_the_same() -> None:
    """An address in memory does not count as a difference."""
    first, second = Rules({"celery": [Healthy()]}), Rules({"celery": [Healthy()]})
    first.follow("celery", second.declared("celery"))
    assert Frozen(2).number == 2


@pytest.mark.parametrize(
    "limits",
    [
        [Limit(concurrency=1, by=header(each), name=each) for each in ("a", "b")],
        [Limit(concurrency=1, by=Key("x"))],
    ],
    ids=["two functions of one name", "unhashable"],
)
def test_a_worker_goes_by_its_own_code(limits: Any, open_app: OpenApp, consume: Any) -> None:
    app = open_app(*limits)
    app.send_task("late")
    found: list[Any] = []
    drain(consume(app, found), 5)
    assert len(found) == 1


def test_dates_are_written_however_they_are_given() -> None:
    for given in ((each for each in ["2026-12-24"]), [datetime(2026, 12, 24)]):
        window = Window("05:00-07:00", except_dates=given)
        made = restored(written(window))
        assert isinstance(made, Window)
        assert made.except_dates == window.except_dates
        assert len(made.except_dates) == 1


def test_all_parts_come_back_after_a_loss(open_app: OpenApp, consume: Any) -> None:
    one, two = open_app(Limit(concurrency=1)), open_app(Timeout("1h"), queue="*")
    connections = [consume(one), consume(two)]
    before = one.delayed.store.policies.read("celery").text
    assert "Limit" in before
    assert "Timeout" in before
    one.send_task("late")
    for connection in connections:  # the first one learns the other's
        drain(connection, 3)
    for connection in connections:
        lose(one)
        for _ in range(3):
            one.send_task("late")
        drain(connection, 5)
        assert one.delayed.store.policies.read("celery").text == before


def test_who_declares_none_keeps_to_limits_that_are_lost(open_app: OpenApp, consume: Any) -> None:
    limited, bare = open_app(Limit(concurrency=1)), open_app()
    consume(limited).close()
    for _ in range(4):
        limited.send_task("late")
    found: list[Any] = []
    connection = drain(consume(bare, found, ack=False), 5)
    assert len(found) == 1
    lose(limited)
    for _ in range(4):
        limited.send_task("late")
    drain(connection, 10)
    assert len(found) == 1


def test_a_full_server_keeps_no_messages_from_workers(
    open_app: OpenApp, consume: Any, client: redis.Redis
) -> None:
    app = open_app(Limit(concurrency=5))
    app.send_task("late")
    found: list[Any] = []
    client.config_set("maxmemory", 1)
    try:
        drain(consume(app, found), 5)
    finally:
        client.config_set("maxmemory", 0)
    assert len(found) == 1


def test_a_failover_is_no_start(group: Group, connect_group: Any) -> None:
    """Policies declared by an older worker do not come back with another master."""
    with connect_group(delayed_policies={"celery": [Limit(concurrency=1)]}) as connection:

        def consume() -> tuple[PolicyRecord, Any]:
            with connection.clone() as clone, Consumer(clone, [Queue("celery")]):
                records = drain(clone).default_channel.store.policies
                return records.read("celery"), records

        ours, records = consume()
        theirs = ours.text.replace("1", "2")
        assert records.declare("celery", theirs, "newer", ours)
        assert consume()[0].text == theirs
        group.fail_over()
        assert consume()[0].text == theirs


@pytest.mark.parametrize("text", ["{", "[]", '{"queue":[{"Newer":{}}]}'])
def test_what_is_damaged_can_be_mended(text: str, open_app: OpenApp, consume: Any) -> None:
    app, bare = open_app(Limit(concurrency=1)), open_app()
    store = app.delayed.store
    store.run("HSET", store.keys("celery").policies, "version", "v", "text", text)
    app.send_task("late")
    found: list[Any] = []
    drain(consume(bare, found), 3)
    assert not found
    app.delayed.policies.drop("celery")
    assert app.delayed.policies.apply("celery")[0].policies == [{"Limit": {"concurrency": 1}}]
    drain(consume(bare, found), 3)
    assert len(found) == 1


def test_getting_one_message_after_a_loss(open_app: OpenApp) -> None:
    app, bare = open_app(Limit(concurrency=1)), open_app()
    app.delayed.policies.apply("celery")
    with bare.connection_for_read() as connection:
        for _ in range(2):
            assert connection.default_channel.basic_get("celery") is None
        lose(app)
        for _ in range(2):
            assert connection.default_channel.basic_get("celery") is None


def test_applying_leaves_temporary_queues_alone(open_app: OpenApp) -> None:
    app = open_app(Limit(concurrency=1))
    app.conf.task_queues = [
        Queue("celery"),
        Queue("brief", expires=60),
        Queue("own", auto_delete=True),
    ]
    assert [each.queue for each in app.delayed.policies.apply()] == ["celery"]


PROJECT = """
from celery import Celery
from celery_ext import install
from celery_ext.policies import Limit
app = Celery(broker="{url}")
install(app)

@app.task(policies=[Limit(concurrency=1)])
def charge(): pass
"""


def test_the_command_line_knows_the_tasks(server: Server, tmp_path: Path) -> None:
    (tmp_path / "project.py").write_text(PROJECT.format(url=f"delayed+{server.url}"))
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "project",
        "delayed",
        "apply-policies",
        "--json",
    ]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert '"project.charge"' in done.stdout
