"""What became of each task, recorded by real workers and read by its id."""

from __future__ import annotations

from typing import Any

import pytest

from celery_ext import Delayed
from tests.kit.extended import Bench
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
    assert [each.id for each in delayed.recorded("retrying")] == ["again"]
