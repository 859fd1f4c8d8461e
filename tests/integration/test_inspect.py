"""`celery inspect` of workers whose app is extended, and Flower, which asks the same."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from celery_ext import install
from celery_ext.worker.remote import inspect
from tests.kit.extended import MODULE, Bench
from tests.kit.servers import Server, free_port
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:Call to deprecated setex")]


def asked(bench: Bench, name: str, *args: Any, **options: Any) -> Any:
    """Return the answer of the only worker."""
    answers = getattr(bench.app.control.inspect(timeout=30, limit=1), name)(*args, **options)
    (answer,) = answers.values()
    return answer


@pytest.mark.smoke
def test_scheduled_and_query_task(bench: Bench) -> None:
    with bench.worker(pool="threads", queues=("celery", "mail")):
        bench.wait_for_answers()
        assert asked(bench, "scheduled") == []
        eta = datetime.now(timezone.utc) + timedelta(hours=2)
        bench.app.send_task("record", (1, "é"), {"k": 2}, task_id="a", eta=eta, priority=3)
        bench.send("b", 3600, queue="mail")
        bench.send("c", 10800)
        bench.send("x", 60, queue="elsewhere")
        entries = asked(bench, "scheduled")
        assert [entry["request"]["id"] for entry in entries] == ["b", "a", "c"]
        assert {entry["total"] for entry in entries} == {3}
        first, second = entries[0], entries[1]
        assert first["request"]["delivery_info"]["routing_key"] == "mail"
        assert timedelta(0) <= datetime.fromisoformat(second["eta"]) - eta < timedelta(seconds=1)
        assert second["priority"] == 3
        request = second["request"]
        assert (request["name"], request["type"]) == ("record", "record")
        assert (request["args"], request["kwargs"]) == ([1, "é"], {"k": 2})
        assert request["hostname"] == "w1@test"

        may_end = bench.directory / "may-end"
        running = bench.app.send_task("until", (str(may_end),))
        bench.ledger.wait_for(1)
        (active,) = asked(bench, "active")
        assert request.keys() == active.keys()
        assert request["delivery_info"].keys() == active["delivery_info"].keys()

        found = asked(bench, "query_task", "a", "x", "missing", running.id)
        assert found.keys() == {"a", running.id}
        assert found["a"] == ["delayed", request]
        assert found[running.id][0] == "active"
        assert asked(bench, "query_task", ["a", "b"]).keys() == {"a", "b"}

        bench.app.control.cancel_consumer("mail", reply=True, limit=1, timeout=30)
        wait_until(
            lambda: [entry["request"]["id"] for entry in asked(bench, "scheduled")] == ["a", "c"],
            "it has forgotten the other queue",
        )
        may_end.touch()


@pytest.mark.smoke
def test_a_page_and_the_total(bench: Bench) -> None:
    parts = [bench.signature("record", n, countdown=3600 + n) for n in range(130)]
    for n, part in enumerate(parts):
        part.apply_async(task_id=f"{n}", queue=("celery", "mail")[n % 2])
    with bench.worker(queues=("celery", "mail")):
        bench.wait_for_answers()
        entries = asked(bench, "scheduled")
        printed = bench.run_celery("inspect", "scheduled", "--json", "-t", "2")
    assert [entry["request"]["id"] for entry in entries] == [f"{n}" for n in range(100)]
    assert {entry["total"] for entry in entries} == {130}
    shown = json.loads(printed[printed.index('{"w1@test"') :].splitlines()[0])
    assert len(shown["w1@test"]) == 100


def state_of(app: Any, *queues: str) -> SimpleNamespace:
    named = [SimpleNamespace(name=name) for name in queues]
    consumer = SimpleNamespace(task_consumer=SimpleNamespace(queues=named))
    return SimpleNamespace(app=app, hostname="w1@test", consumer=consumer)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A task that the worker itself holds."""
    own = {"eta": None, "priority": 6, "request": {"id": "own"}}
    monkeypatch.setattr(inspect, "_own_scheduled", lambda state: [own])
    monkeypatch.setattr(inspect, "_own_query_task", lambda state, ids: {"own": ("scheduled", {})})
    return own


def test_what_the_worker_holds_itself_comes_first(bench: Bench, own: Any) -> None:
    bench.send("a", args=(1,), serializer="pickle")
    first, second = inspect.scheduled(state_of(bench.app, "celery"))
    assert (first, second["request"]["id"]) == (own, "a")
    assert (second["request"]["args"], second["request"]["kwargs"]) == ("(1,)", "{}")
    found = inspect.query_task(state_of(bench.app, "celery"), ["own", "a"])
    assert {id: known for id, (known, _) in found.items()} == {"own": "scheduled", "a": "delayed"}
    starting = SimpleNamespace(task_consumer=None)
    state = SimpleNamespace(app=bench.app, hostname="w1@test", consumer=starting)
    assert inspect.scheduled(state) == [own]


@pytest.mark.parametrize("url", ["memory://", "redis://127.0.0.1:{port}/3"])
@pytest.mark.parametrize("is_installed", [True, False])
def test_a_worker_without_a_backlog(url: str, is_installed: bool, server: Server, own: Any) -> None:
    with make_app(Settings(url.format(port=server.port))) as app:
        if is_installed:
            install(app)
        assert inspect.scheduled(state_of(app, "celery")) == [own]
        assert inspect.query_task(state_of(app, "celery"), ["a"]).keys() == {"own"}


@pytest.fixture
def flower(bench: Bench) -> Iterator[str]:
    pytest.importorskip("flower")
    port = free_port()
    options = f"flower --port={port} --address=127.0.0.1"
    command = [sys.executable, "-m", "celery", "-A", MODULE, *options.split()]
    env = {"FLOWER_UNAUTHENTICATED_API": "1"}
    program = Worker(bench.settings, bench.directory, name="flower", command=command, env=env)
    program.start(wait=False)
    yield f"http://127.0.0.1:{port}"
    program.stop()


def page(url: str, data: bytes | None = None) -> str:
    try:
        with urllib.request.urlopen(url, data, timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


@pytest.mark.smoke
def test_flower(bench: Bench, flower: str) -> None:
    """Its pages show the backlog, and its button takes a task out of it."""
    bench.send("a", args=("shown",))
    with bench.worker(options=["-E"]) as worker:

        def scheduled() -> Any:
            url = f"{flower}/api/workers?refresh=1&workername={worker.name}"
            answer = json.loads(page(url) or "{}")
            return answer.get(worker.name, {}).get("scheduled")

        (entry,) = wait_until(scheduled, "Flower knows the backlog", 20)
        assert (entry["request"]["id"], entry["total"]) == ("a", 1)
        shown = wait_until(lambda: page(f"{flower}/worker/{worker.name}"), "Flower's page", 10)
        assert "shown" in shown
        assert page(f"{flower}/api/task/revoke/a", b"")
    assert bench.backlog() == set()
    assert bench.result("a").state == "REVOKED"
