"""Lifecycle events of real workers, and the signals of late and of buried tasks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import redis
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Reject
from celery.signals import setup_logging, task_received

from celery_ext import install
from celery_ext.app.signals import task_buried, task_late
from kombu_delayed.inspection.events import Event
from kombu_delayed.store.dead_letters import DeadLetters
from kombu_delayed.store.store import Limits, Store
from tests.kit.extended import Bench, extended
from tests.kit.heard import heard
from tests.kit.servers import Server
from tests.kit.wait import wait_until


@contextmanager
def worker_in_this_process(bench: Bench, **options: Any) -> Iterator[None]:
    """A worker that leaves the process's logging alone."""

    def leave(**_: Any) -> None:
        return

    setup_logging.connect(leave)
    try:
        with start_worker(bench.app, perform_ping_check=False, **options):
            yield
    finally:
        setup_logging.disconnect(leave)


def of(bench: Bench, id: str) -> list[Event]:
    return list(bench.app.delayed.events(task_id=id))


def names(bench: Bench, id: str) -> list[str]:
    return [event.event for event in of(bench, id)]


@pytest.mark.smoke
@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_worker_tells_under_its_name(bench: Bench, pool: str) -> None:
    bench.send("a", countdown=0.5, headers={"tenant": "acme"})
    bench.app.send_task("record", task_id="b")
    with bench.worker("w1", pool=pool):
        wait_until(
            lambda: names(bench, "a")[-1:] == ["acked"] == names(bench, "b")[-1:], "both ran"
        )
    assert names(bench, "a") == ["scheduled", "delivered", "acked"]
    assert names(bench, "b") == ["delivered", "acked"]
    scheduled, delivered, acked = of(bench, "a")
    assert scheduled.due_ms == delivered.due_ms == acked.due_ms
    assert scheduled.at_ms < scheduled.due_ms <= delivered.at_ms <= acked.at_ms  # type: ignore[operator]
    assert (delivered.task, delivered.tenant, delivered.queue) == ("record", "acme", "celery")
    assert delivered.worker == acked.worker == "w1@test"


def consumer_name(bench: Bench) -> str:
    wait_until(lambda: bench.app.delayed.consumers("celery"), "it consumes")
    (consumer,) = bench.app.delayed.consumers("celery")
    return consumer.name


def test_a_second_worker_of_the_process_has_its_own_name(bench: Bench) -> None:
    for name in ("w1@host", "w2@host"):
        with worker_in_this_process(bench, hostname=name):
            assert consumer_name(bench).startswith(f"{name}:")


def test_a_worker_of_the_process_leaves_no_thread(bench: Bench) -> None:
    def recording() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "delayed-outcomes"}

    before = recording()
    with worker_in_this_process(bench):
        assert recording() - before
    assert not recording() - before


def test_a_name_that_the_user_has_chosen_stays(server: Server, tmp_path: Path) -> None:
    with extended(server, tmp_path) as bench:
        bench.app.conf.broker_transport_options = {"delayed_consumer_name": "mine"}
        with worker_in_this_process(bench, hostname="w1@host"):
            assert consumer_name(bench).startswith("mine:")


def test_a_task_that_comes_late(bench: Bench) -> None:
    install(bench.app, late_seconds=100)
    eta = datetime.now(timezone.utc) - timedelta(seconds=200)
    for id, seconds in (("late", 0), ("soon", 150)):
        bench.app.send_task("noop", task_id=id, eta=eta + timedelta(seconds=seconds))
    bench.app.send_task("noop", task_id="now")
    with heard(task_late) as late, worker_in_this_process(bench):
        bench.result("now").get(timeout=60)
    assert not task_received.receivers
    (given,) = late
    assert (given["sender"], given["task_id"], given["eta"]) == ("noop", "late", eta.isoformat())
    assert 200 <= given["late_seconds"] < 260


def test_a_task_that_is_buried(bench: Bench) -> None:
    @bench.app.task(name="refuse", acks_late=True, shared=False)
    def refuse() -> None:
        raise Reject("no", requeue=False)

    refuse.apply_async(task_id="a", countdown=3600)
    assert bench.app.delayed.reschedule("a", countdown=0)
    with heard(task_buried) as buried, worker_in_this_process(bench):
        wait_until(lambda: buried, "it is buried")
    (given,) = buried
    info = given["info"]
    assert given["sender"] == info.task == "refuse"
    assert (info.id, info.state, info.reason) == ("a", "dead", "no")
    assert names(bench, "a") == ["scheduled", "rescheduled", "delivered", "buried"]


def test_a_broken_connection_when_telling_of_a_burial_stops_nothing(
    bench: Bench, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.app.send_task("noop", task_id="a")
    real = bench.app.delayed.store.over(store.client)
    real.limits = Limits(max_deliveries=1)
    real.deliver("celery", "me", 1, 1, lease_ms=30_000)

    def broken(*_: Any) -> Any:
        raise redis.ConnectionError("gone")

    monkeypatch.setattr(DeadLetters, "letters", broken)
    with heard(task_buried) as buried:
        assert real.release("celery", "me", [1], counted=True) == 1
        text = "Cannot send task_buried for dead letters in queue 'celery': gone"
        wait_until(lambda: text in caplog.text, "it is logged")
    assert buried == []
