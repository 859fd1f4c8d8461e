"""Where a task is: its message takes precedence over older records under its id."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from celery_ext.control import outcomes
from celery_ext.control.changes import ready
from tests.kit.extended import Bench
from tests.kit.outcomes import FAILED, NOW_MS, RECEIVED, STARTED, note
from tests.kit.tasks_app import make_app
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough

REPLACED = ["x", NOW_MS, 0, {"why": "ignored", "message": "Replaced by new task"}]

RECORDS: dict[str, list[Any]] = {
    "failed": FAILED,
    "succeeded": ["+", NOW_MS, 0, 5],
    "cancelled": ["x", NOW_MS, 0, {"why": "cancelled"}],
    "rejected": ["x", NOW_MS, 0, {"why": "rejected"}],
    "replaced": REPLACED,
    "returned": ["b", NOW_MS, 0, {}],
    "running": STARTED,
    "received": RECEIVED,
}


def state(bench: Bench, id: str, queue: str | None = None) -> str | None:
    info = bench.app.delayed.get(id, queue)
    return info.state if info else None


@pytest.mark.parametrize("record", RECORDS)
def test_what_is_ready_can_be_controlled_whatever_its_record_says(
    record: str, bench: Bench
) -> None:
    delayed = bench.app.delayed
    for id in ("a", "b", "c"):
        note(delayed, id, RECEIVED, RECORDS[record])
        bench.app.send_task("record", task_id=id)
    assert state(bench, "a") == "ready"
    assert delayed.reschedule("a", countdown=3600)
    assert state(bench, "a") == "delayed"
    assert delayed.change("b", priority=3)
    assert delayed.cancel_ids(["b", "c", "nobody"]) == {"b", "c"}
    assert state(bench, "c") == "cancelled"
    assert not delayed.cancel("c")


@pytest.mark.parametrize("record", RECORDS)
def test_a_long_list_is_read_for_what_may_be_there(
    record: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is over, or with a worker, is there only if its id is used again."""
    for module in (outcomes, ready):
        monkeypatch.setattr(module, "SHORT", 1)
    delayed, may_be_there = bench.app.delayed, record in ("rejected", "replaced", "returned")
    note(delayed, "a", RECEIVED, RECORDS[record])
    for id in ("a", "other"):
        bench.app.send_task("record", task_id=id)
    assert delayed.cancel("a") is may_be_there
    expected = "cancelled" if may_be_there else {"received": "unacked"}.get(record, record)
    assert state(bench, "a") == expected
    assert state(bench, "other") == "ready"  # which has had the list read
    assert state(bench, "a") == ("cancelled" if may_be_there else "ready")


def test_what_has_moved_to_a_queue_that_this_app_does_not_declare(bench: Bench) -> None:
    delayed, retry = bench.app.delayed, ["~", NOW_MS, 0, {"next_ms": NOW_MS}]
    second = [["r", NOW_MS + 1, 1, "w2:1:b"], ["-", NOW_MS + 2, 1, FAILED[3]]]
    note(delayed, "failed", RECEIVED, STARTED, retry)
    note(delayed, "failed", *second, queue="elsewhere")
    note(delayed, "replaced", RECEIVED, STARTED, REPLACED)
    with make_app(bench.settings) as other:
        other.send_task("record", task_id="replaced", queue="elsewhere")
    assert (state(bench, "failed"), state(bench, "replaced")) == ("failed", "ready")
    history = delayed.history("failed")
    assert history is not None
    assert [step.event for step in history.steps] == [
        *("received", "started", "retrying", "received", "failed")
    ]
    assert (history.state, history.queue) == ("failed", "elsewhere")
    assert delayed.cancel("replaced")
    assert state(bench, "replaced") == "cancelled"


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_is_replaced_in_another_queue(pool: str, bench: Bench) -> None:
    app = bench.app
    app.send_task("hand_on", ("noop", None, "elsewhere"), task_id="ends")
    app.send_task("hand_on", ("noop", 3600, "elsewhere"), task_id="waits")
    with bench.worker(pool=pool, concurrency=1, queues=("celery", "elsewhere")):
        wait_until(lambda: state(bench, "ends") == "succeeded", "the other task has run", 60)
        wait_until(lambda: state(bench, "waits") == "delayed", "the other task waits", 60)
    history = app.delayed.history("ends")
    assert history is not None
    assert [step.event for step in history.steps if step.event not in ("received", "started")] == [
        *("retrying", "replaced", "succeeded")
    ]


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_task_that_leaves_a_pool_without_processes_is_lost(pool: str, bench: Bench) -> None:
    app = bench.app
    app.send_task("leave", task_id="a")
    with bench.worker(pool=pool, concurrency=1) as worker:
        wait_until(lambda: state(bench, "a") == "lost", "it is known to be lost", 60)
        app.send_task("noop", task_id="b")
        wait_until(lambda: state(bench, "b") == "succeeded", "the worker goes on", 60)
    assert "TypeError" not in worker.log


def test_a_dead_letter_that_is_replayed_waits_again(bench: Bench) -> None:
    app, delayed = bench.app, bench.app.delayed
    app.send_task("reject", task_id="a")
    with bench.worker(pool="threads", concurrency=1):
        wait_until(lambda: state(bench, "a") == "dead", "it is a dead letter", 60)
    assert delayed.dead.replay(["a"]) == 1
    assert state(bench, "a") == "ready"
    assert delayed.reschedule("a", eta=datetime(2100, 1, 1, tzinfo=timezone.utc))
    assert state(bench, "a") == "delayed"
    assert delayed.cancel("a")
    assert state(bench, "a") == "cancelled"
