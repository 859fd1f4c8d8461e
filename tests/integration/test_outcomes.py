"""The outcome of each task, recorded by real workers and read by its id."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from celery.worker.request import Request

from celery_ext import Delayed, install
from kombu_delayed.store.outcomes.tallies import LEVELS, Tally, slots
from tests.kit.clusters import Cluster
from tests.kit.extended import Bench, extended
from tests.kit.outcomes import FAILED, LATE, NOW_MS, RECEIVED, STARTED, note
from tests.kit.servers import Server
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough

SENT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "good": ("add", (1, 2)),
    "bad": ("add", (1, None)),
    "late": ("late", ()),
    "again": ("retry", (3600,)),
    "twice": ("retry", (0,)),
    "refused": ("reject", ()),
}
STATES = {
    "good": "succeeded",
    "bad": "failed",
    "late": "succeeded",
    "again": "retrying",
    "twice": "succeeded",
    "refused": "dead",
    "delayed": "succeeded",
}


def states(delayed: Delayed, ids: Any) -> dict[str, str | None]:
    found = {id: delayed.get(id) for id in ids}
    return {id: info and info.state for id, info in found.items()}


def events(delayed: Delayed, id: str) -> list[str]:
    history = delayed.history(id)
    return [step.event for step in history.steps] if history else []


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet", "solo"])
def test_every_pool(pool: str, bench: Bench) -> None:
    delayed = bench.app.delayed
    for id, (name, args) in SENT.items():
        bench.app.send_task(name, args, task_id=id)
    bench.app.send_task("noop", task_id="expired", expires=-1)
    bench.app.send_task("noop", task_id="delayed", countdown=0.5)
    with bench.worker(pool=pool, concurrency=2) as worker:
        wait_until(lambda: states(delayed, STATES) == STATES, "all outcomes are known", 60)
        bench.app.send_task("sleep", (3600,), task_id="long")
        if pool != "solo":
            wait_until(lambda: states(delayed, ["long"]) == {"long": "running"}, "it runs", 30)
            (running,) = delayed.recorded("running")
            assert (running.id, running.worker) == ("long", worker.name)
        worker.kill()
    assert events(delayed, "good") == ["received", "started", "succeeded"]
    assert events(delayed, "twice") == [
        *("received", "started", "retrying"),
        *("received", "started", "succeeded"),
    ]
    assert states(delayed, ["expired"]) == {"expired": "expired"}
    (failed,) = delayed.recorded("failed")
    failure = failed.failure
    assert failure is not None
    assert (failed.id, failed.task, failure.error) == ("bad", "add", "TypeError")
    assert "unsupported operand" in failure.message
    assert "return x + y" in failure.traceback
    assert failure.args == "(1, None)"
    assert failure.attempts is None  # it may be retried, and is not: this was no first of many
    assert [each.id for each in delayed.recorded("retrying")] == ["again"]
    again = delayed.history("again")
    assert again is not None
    assert [step.attempts for step in again.steps if step.event == "retrying"] == [6]
    assert (delayed.get(""), delayed.history("")) == (None, None)
    for level in LEVELS:
        counted = Tally()
        for each in slots(delayed.store, ["celery"], level, time.time()):
            counted += each.tally
        assert {state: counted.end(state) for state in "+-~x"} == {"+": 4, "-": 1, "~": 2, "x": 2}
        assert counted.late_seconds(1) is not None


def test_processes_that_die(bench: Bench) -> None:
    delayed = bench.app.delayed
    bench.app.send_task("die", task_id="killed")
    bench.app.send_task("sleep", (3600,), task_id="slow", time_limit=1)
    bench.app.send_task("sleep", (3600,), task_id="stopped")
    with bench.worker(pool="prefork", concurrency=3, gossip=True):
        wait_until(lambda: states(delayed, ["stopped"]) == {"stopped": "running"}, "it runs", 30)
        bench.wait_for_answers()
        assert delayed.terminate("stopped")
        expected = {"killed": "lost", "slow": "failed", "stopped": "cancelled"}
        wait_until(lambda: states(delayed, expected) == expected, "all have ended", 60)
    assert events(delayed, "slow") == ["received", "started", "timed out"]
    assert events(delayed, "stopped")[2:] == ["terminated"]
    assert {each.id for each in delayed.recorded("failed")} == {"killed", "slow"}
    assert {each.id for each in delayed.recorded("failed", error="TimeLimit*")} == {"slow"}


@pytest.mark.skipif(not hasattr(Request, "_success_was_stored"), reason="Celery 5.7 has this")
def test_a_process_that_dies_after_its_result_is_stored(bench: Bench) -> None:
    with bench.worker(pool="prefork"):
        bench.app.send_task("die_at_the_end", task_id="a")
        wait_until(lambda: states(bench.app.delayed, "a") == {"a": "succeeded"}, "it has ended", 60)


@pytest.mark.parametrize("error", ["WorkerLostError", "TimeLimitExceeded"])
def test_a_task_that_may_have_returned_is_looked_for(
    error: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery can return the message of a task that has died or timed out, to a long list."""
    monkeypatch.setattr("celery_ext.control.outcomes.SHORT", 0)
    bench.app.send_task("record", task_id="again")
    note(bench.app.delayed, "again", RECEIVED, LATE, ["-", NOW_MS, 0, {"error": error}])
    assert states(bench.app.delayed, ["again"]) == {"again": "ready"}
    assert bench.app.delayed.cancel("again")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_worker_that_ends_says_so(number: int, bench: Bench) -> None:
    """Its state is known before its last sign of life is too old."""
    delayed = bench.app.delayed
    bench.app.send_task("noop", task_id="short")
    with bench.worker(pool="prefork", concurrency=1) as worker:
        wait_until(lambda: states(delayed, ["short"]) == {"short": "succeeded"}, "it ran", 30)
        if number == signal.SIGQUIT:
            bench.app.send_task("sleep", (3600,), task_id="cut off")
            running = {"cut off": "running"}
            wait_until(lambda: states(delayed, running) == running, "it runs", 30)
        worker.stop(number)
    assert delayed.store.run("KEYS", "*outcomes:workers") == []
    if number == signal.SIGQUIT:
        assert states(delayed, ["cut off"]) == {"cut off": "lost"}


@pytest.mark.crash
def test_a_server_that_was_away(own_server: Server, tmp_path: Path) -> None:
    """Tasks that end during the outage are recorded once the server is back."""
    with extended(own_server, tmp_path) as bench:
        delayed = bench.app.delayed
        bench.app.send_task("noop", task_id="before")
        with bench.worker(pool="threads", concurrency=2) as worker:
            wait_until(lambda: states(delayed, ["before"]) == {"before": "succeeded"}, "it ran", 30)
            may_end = tmp_path / "may-end"
            bench.app.send_task("until", (str(may_end),), task_id="through", ignore_result=True)
            wait_until(lambda: states(delayed, ["through"]) == {"through": "running"}, "it runs")
            own_server.stop()
            may_end.touch()
            worker.wait_for_log("Outcomes of tasks are not recorded for now", 30)
            own_server.start()
            worker.wait_for_log("Outcomes of tasks are recorded again", 60)
            ended = {"before": "succeeded", "through": "succeeded"}
            wait_until(lambda: states(delayed, ended) == ended, "both are known", 60)


def test_one_truth(bench: Bench) -> None:
    """The waiting message, if any, and the record together give the state of a task."""
    delayed = bench.app.delayed
    for id in ("ready", "again", "taken"):  # the last one has gone back to its queue
        bench.app.send_task("record", task_id=id)
    bench.send("retried", queue="celery")
    bench.send("cancelled")
    assert delayed.cancel("cancelled")
    for id, rows, alive_ms in (
        ("running", [RECEIVED, STARTED], 60_000),
        ("taken", [RECEIVED], 60_000),
        ("failed", [RECEIVED, STARTED, FAILED], 60_000),
        ("retried", [RECEIVED, STARTED, ["~", NOW_MS, 0, {"next_ms": NOW_MS}]], 60_000),
    ):
        note(delayed, id, *rows, alive_ms=alive_ms)
    expected = {
        "ready": "ready",
        "taken": "ready",
        "running": "running",
        "failed": "failed",
        "retried": "retrying",
        "cancelled": "cancelled",
        "nobody": None,
    }
    assert states(delayed, expected) == expected
    failed = delayed.get("failed")
    assert failed is not None
    assert (failed.task, failed.args, failed.reason) == ("mail", "(7,)", "ValueError: no")
    assert failed.as_dict()["state"] == "failed"
    note(delayed, "again", RECEIVED, LATE)
    note(delayed, "gone", RECEIVED, STARTED, alive_ms=0)
    # It was acknowledged, so it had ended: only its record is lost.
    note(delayed, "ended", RECEIVED, LATE, alive_ms=0)
    # With the worker dead, late-acked tasks are where their messages are; the rest is lost.
    expected = {"again": "ready", "taken": "ready", "running": "lost", "gone": "lost"}
    assert states(delayed, [*expected, "ended"]) == {**expected, "ended": "unknown"}


def test_commands(bench: Bench) -> None:
    delayed = bench.app.delayed
    note(delayed, "bad", RECEIVED, STARTED, FAILED)
    note(delayed, "runs", RECEIVED, STARTED, queue="other")
    shown = bench.run_celery("delayed", "failed", "--error", "Value*")
    assert "ValueError" in shown
    assert "bad" in shown
    assert "runs" in bench.run_celery("delayed", "find", "--state", "running")
    history = bench.run_celery("delayed", "history", "bad", "--json")
    assert [step["event"] for step in json.loads(history[history.index("{") :])["steps"]] == [
        *("received", "started", "failed")
    ]


def test_a_cluster(cluster: Cluster, bench: Bench) -> None:
    app = bench.app
    app.conf.broker_url = f"delayed+{cluster.url}"
    delayed = install(app)
    try:
        for queue in ("a", "b", "c"):
            note(delayed, queue, RECEIVED, STARTED, FAILED, queue=queue)
        found = {queue: delayed.get(queue, queue) for queue in ("a", "b", "c")}
        assert {queue: info and info.state for queue, info in found.items()} == dict.fromkeys(
            ("a", "b", "c"), "failed"
        )
    finally:
        delayed.close()
