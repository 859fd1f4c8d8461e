"""Ready tasks are found, cancelled, changed and moved like delayed tasks."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from time import time
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_ext import Delayed, Query, QueryError
from celery_ext.app.signals import task_cancelled, task_rescheduled
from celery_ext.control.changes import change, moves
from celery_ext.control.changes.moves import Moves
from kombu_delayed.connection.connection import ServerConnection
from kombu_delayed.inspection.ready import lists as module
from tests.kit.extended import Bench
from tests.kit.heard import heard

pytestmark = [pytest.mark.filterwarnings("ignore:Call to deprecated setex")]


@pytest.fixture
def ready(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Delayed:
    """Nine ready tasks of three tenants, and a delayed one; pages are small."""
    monkeypatch.setattr(module, "PAGE_SIZE", 2)
    for n in range(9):
        bench.send(f"t{n}", 0, args=(n,), headers={"tenant": f"tenant{n % 3}"})
    bench.send("later", headers={"tenant": "tenant1"})
    delayed: Delayed = bench.app.delayed
    return delayed


def ready_ids(delayed: Delayed, **criteria: Any) -> list[str]:
    return [info.id for info in delayed.find(state="ready", **criteria)]


def test_found_and_counted(ready: Delayed) -> None:
    assert ready_ids(ready) == [f"t{n}" for n in range(8, -1, -1)]
    assert ready_ids(ready, tenant="tenant1") == ["t7", "t4", "t1"]
    assert ready_ids(ready, queue="other") == ready_ids(ready, due_before="2100-01-01") == []
    assert ready.count(Query(state="ready", task="rec*")) == 9
    with pytest.raises(QueryError, match="state='dead' is not one of delayed, ready"):
        ready.find(state="dead")


def test_many(ready: Delayed) -> None:
    meant = Query(state="ready", tenant="tenant1")
    preview = ready.cancel_many(meant, dry_run=True)
    assert (preview.matched, preview.changed) == (3, 0)
    assert [info.id for info in preview.sample] == ["t7", "t4", "t1"]
    assert ready.cancel_many(meant).changed == 3
    moved = Query(state="ready", tenant="tenant2")
    assert ready.reschedule_many(moved, by=timedelta(hours=1)).changed == 3
    assert ready_ids(ready) == ["t6", "t3", "t0"]
    assert {info.id for info in ready.find()} == {"t8", "t5", "t2", "later"}
    with pytest.raises(QueryError, match="as soon as a worker is free"):
        ready.run_now_many(moved)
    with pytest.raises(QueryError, match="to a later time"):
        ready.reschedule_many(Query(state="ready"), to="2001-01-01")
    assert ready_ids(ready) == ["t6", "t3", "t0"]


def test_a_clock_that_is_ahead_lets_no_task_run_early(
    ready: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a time has passed is decided by the server's clock."""
    now = datetime.now(timezone.utc)
    for each in (moves, change):
        monkeypatch.setattr(each, "time", lambda: now.timestamp() + 7_200, raising=False)
    assert ready.reschedule("t1", eta=now + timedelta(hours=1))
    assert ready.change("t2", eta=now + timedelta(hours=1), priority=3)
    assert {info.id for info in ready.find()} == {"t1", "t2", "later"}


def test_spread(ready: Delayed) -> None:
    start_ms = time() * 1000
    meant = Query(state="ready", task="record")
    outcome = ready.reschedule_many(meant, spread=timedelta(hours=9))
    assert (outcome.matched, outcome.changed) == (9, 9)
    assert ready_ids(ready) == ["t8"]  # the first one found
    found = [info.due_ms or 0 for info in ready.find() if info.id != "later"]
    waits = [(due_ms - start_ms) / 3_600_000 for due_ms in found]
    assert waits == pytest.approx(range(1, 9), abs=0.1)
    with pytest.raises(QueryError, match="to a later time"):
        ready.reschedule_many(meant, to="2001-01-01", spread=timedelta(hours=9))
    with pytest.raises(QueryError, match="to a later time"):
        ready.reschedule_many(meant, spread=0)


def test_two_operators_at_once(ready: Delayed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first page shrinks under one of them, so that its next page begins too far."""
    first: list[Any] = []

    def meanwhile(self: Moves, tasks: Any) -> list[Any]:
        if not first:
            first.extend(each.info.id for each in tasks)
            for id in first:
                assert ready.cancel(id)
        return cancel(self, tasks)

    cancel = Moves.cancel_ready
    monkeypatch.setattr(Moves, "cancel_ready", meanwhile)
    outcome = ready.cancel_many(Query(state="ready"))
    assert (first, ready_ids(ready)) == (["t8", "t7"], [])
    assert (outcome.matched, outcome.changed) == (9, 7)


@pytest.mark.smoke
def test_a_worker_runs_what_is_left_of_it(ready: Delayed, bench: Bench) -> None:
    with heard(task_cancelled) as cancelled, heard(task_rescheduled) as moved:
        assert ready.cancel("t0")
        assert ready.reschedule("t1", countdown=3_600)
        assert ready.change("t2", args=["changed"])
        assert ready.change("t3", priority=9)
        assert ready.run_now("t8")
        assert not ready.cancel("t0")
        assert not ready.change("t4", accepts=lambda info: False, priority=9)
        assert ready.cancel_ids(["t7", "later", "gone"]) == {"t7", "later"}
    assert [each["info"].id for each in cancelled] == ["t0", "later", "t7"]
    assert [each["task_id"] for each in moved] == ["t1", "t8"]
    info = ready.get("t0")
    assert info is not None
    assert info.state == "cancelled"
    with bench.worker(pool="solo"):
        bench.ledger.wait_for(6)
        with pytest.raises(TaskRevokedError):
            bench.result("t0").get(timeout=60)
        assert not ready.cancel("t8")
    assert bench.ledger.ids() == ["t8", "t2", "t4", "t5", "t6", "t3"]
    assert bench.ledger.of("t2")[0]["args"] == ["changed"]
    assert bench.backlog() == {"t1"}


def test_found_by_id_in_few_round_trips(ready: Delayed, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, send = [], ServerConnection._send

    def told_send(self: ServerConnection, *args: Any) -> Any:
        sent.append(args)
        return send(self, *args)

    first = ready.get("t0")
    assert first is not None
    monkeypatch.setattr(ServerConnection, "_send", told_send)
    for n in range(9):
        found = ready.get(f"t{n}", "celery")
        assert found is not None
        assert (found.id, found.state, found.tenant) == (f"t{n}", "ready", f"tenant{n % 3}")
    # Each time how many shards there are, its record and delayed or dead message, and its place.
    assert len(sent) == 9 * 3


def test_changed_by_id_without_reading(ready: Delayed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ready.get("t0")
    read: list[int] = []
    page = module.ReadyLists.page

    def told(self: module.ReadyLists, step: int, start: int, *args: Any) -> Any:
        read.append(start)
        return page(self, step, start, *args)

    monkeypatch.setattr(module.ReadyLists, "page", told)
    assert ready.cancel("t4")
    assert ready.reschedule("t1", countdown=3_600)
    assert ready.change("t2", args=["changed"])
    assert ready.change("t8", args=["changed"])  # the newest one
    assert ready.run_now("t8")
    assert ready.cancel_ids(["t7", "t0"]) == {"t7", "t0"}
    assert ready.cancel("t6")
    assert read == []
    assert ready.change("t5", priority=9)
    monkeypatch.undo()
    assert sorted(ready_ids(ready)) == ["t2", "t3", "t5", "t8"]


def test_two_with_one_id_are_cancelled_both(ready: Delayed, bench: Bench) -> None:
    bench.send("t3", 0, args=("again",))
    assert ready.get("t3")
    assert ready.cancel("t3")
    assert "t3" not in ready_ids(ready)
