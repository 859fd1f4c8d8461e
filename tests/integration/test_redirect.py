"""Tasks are moved to another queue as they are: each is in one of the two at any time."""

from __future__ import annotations

import os
import signal
from multiprocessing import get_context
from time import monotonic, time
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from celery_ext import Delayed, Query, QueryError
from celery_ext.app.signals import task_cancelled
from celery_ext.control.changes import redirect as module
from celery_ext.control.changes.redirect import Redirect
from celery_ext.policies import DropOlder
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.transport.channel.channel import Channel
from tests.kit.extended import Bench
from tests.kit.heard import heard
from tests.kit.http import bury
from tests.kit.policed import OpenApp, take

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:Call to deprecated setex")]


@pytest.fixture
def filled(bench: Bench) -> Delayed:
    """Three ready tasks and three delayed ones; `there` is in the other queue."""
    for n in range(3):
        bench.send(f"r{n}", 0, args=(n,), headers={"tenant": f"tenant{n}"})
        bench.send(f"d{n}", 3600 + n, args=(n,), headers={"tenant": f"tenant{n}"})
    bench.send("there", queue="other")
    delayed: Delayed = bench.app.delayed
    return delayed


def where(delayed: Delayed) -> dict[str, list[str]]:
    """The ids of delayed and ready tasks, by queue."""
    found: dict[str, list[str]] = {}
    for state in ("delayed", "ready"):
        for info in delayed.find(state=state):
            found.setdefault(info.queue, []).append(info.id)
    return {queue: sorted(ids) for queue, ids in found.items()}


def test_what_moves_stays_as_it_was(filled: Delayed, bench: Bench) -> None:
    before = {info.id: info for info in filled.find()}
    with heard(task_cancelled) as told:
        for state in ("delayed", "ready"):
            meant = Query(queue="celery", tenant="tenant1", state=state)
            preview = filled.redirect_many(meant, "other", dry_run=True)
            assert (preview.matched, preview.changed) == (1, 0)
            assert filled.redirect_many(meant, "other").changed == 1
    assert where(filled) == {"celery": ["d0", "d2", "r0", "r2"], "other": ["d1", "r1", "there"]}
    moved = filled.get("d1")
    assert moved is not None
    assert (moved.due_ms, moved.args) == (before["d1"].due_ms, before["d1"].args)
    assert moved.properties["delivery_info"]["routing_key"] == "other"
    assert told == []
    with bench.worker(queues=["other"]):
        bench.ledger.wait_for_all(["r1"])
    assert len(bench.ledger.of("r1")) == 1


def test_ready_tasks_keep_their_order(filled: Delayed, bench: Bench) -> None:
    assert filled.redirect_many(Query(queue="celery", state="ready"), "other").changed == 3
    with bench.worker(queues=["other"], concurrency=1):
        bench.ledger.wait_for_all(["r0", "r1", "r2"])
    assert [*dict.fromkeys(bench.ledger.ids())] == ["r0", "r1", "r2"]


def test_its_due_time_stays_whatever_its_headers_say(filled: Delayed, bench: Bench) -> None:
    """They name the time that was asked for when the task was sent."""
    once = {"delayed_unique": "key", "delayed_conflict": "debounce"}
    bench.send("pushed", 100, headers=once)
    bench.send("again", 5000, headers=once)
    before = filled.get("pushed")
    assert filled.run_now("d1")
    assert before is not None
    for id in ("pushed", "d1"):
        assert filled.redirect(id, "other")
    after = filled.get("pushed")
    assert after is not None
    assert (after.queue, after.due_ms) == ("other", before.due_ms)
    assert where(filled)["other"] == ["d1", "pushed", "there"]
    assert [info.id for info in filled.find(state="ready", queue="other")] == ["d1"]
    with bench.worker(queues=["other"]):
        bench.ledger.wait_for_all(["d1"])


@pytest.mark.parametrize("state", ["delayed", "ready"])
def test_a_broker_that_fails_on_the_way(
    filled: Delayed, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dues = {info.id: info.due_ms for info in filled.find()}
    put, left = Channel._put, [1]

    def fails(self: Any, queue: str, *args: Any, **options: Any) -> None:
        if not left:
            raise OperationalError("it is gone")
        left.pop()
        put(self, queue, *args, **options)

    monkeypatch.setattr(Channel, "_put", fails)
    monkeypatch.setattr(module, "TRY_SECONDS", 0.1)
    with pytest.raises(OperationalError):
        filled.redirect_many(Query(queue="celery", state=state), "other")
    monkeypatch.undo()
    found = where(filled)
    first = {"delayed": "d0", "ready": "r0"}[state]
    assert found["other"] == sorted([first, "there"])
    assert found["celery"] == sorted({"r0", "r1", "r2", "d0", "d1", "d2"} - {first})
    assert {info.id: info.due_ms for info in filled.find()} == dues
    counts = filled.counts("celery")["celery"]
    assert (counts.ready, counts.delayed) == ((3, 2) if state == "delayed" else (2, 3))


@pytest.mark.parametrize("state", ["delayed", "ready"])
def test_what_was_sent_is_dropped_after_all(
    filled: Delayed, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would run in both queues."""
    cancel, fails = Backlog.cancel, iter([True, True, False])

    def cancels(self: Backlog, *args: Any, **options: Any) -> Any:
        if next(fails, False):
            raise OperationalError("it is gone")
        return cancel(self, *args, **options)

    monkeypatch.setattr(Backlog, "cancel", cancels)
    assert filled.redirect_many(Query(queue="celery", state=state), "other").changed == 3
    moved = {"delayed": ["d0", "d1", "d2"], "ready": ["r0", "r1", "r2"]}[state]
    found = where(filled)
    assert found["other"] == sorted([*moved, "there"])
    assert found["celery"] == sorted({"r0", "r1", "r2", "d0", "d1", "d2"} - {*moved})


def test_what_is_in_both_queues_is_named(filled: Delayed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Backlog, *args: Any, **options: Any) -> Any:
        raise OperationalError("it is gone")

    monkeypatch.setattr(Backlog, "cancel", fails)
    monkeypatch.setattr(module, "TRY_SECONDS", 0.1)
    named = (
        r"task d0 is in queue 'other' now, but could not be taken out of 'celery': .*: it is gone"
    )
    with pytest.raises(OperationalError, match=named):
        filled.redirect_many(Query(queue="celery"), "other")
    assert where(filled)["other"] == ["d0", "there"]


@pytest.mark.parametrize("state", ["delayed", "ready"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_tasks_of_the_other_queue_are_not_counted(
    filled: Delayed, bench: Bench, state: str, dry_run: bool
) -> None:
    bench.send("later", 3600, queue="other")
    found = filled.redirect_many(Query(state=state), "other", dry_run=dry_run)
    assert (found.matched, found.changed) == (3, 0 if dry_run else 3)
    assert found.queues == {"celery": 3}


def test_what_is_changed_meanwhile_stays_as_it_was_changed(
    filled: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks were read before: the old copies do not replace the current messages."""
    hold = Redirect._hold

    def change_first(self: Redirect, *args: Any) -> Any:
        assert filled.change("d0", args=[99])
        assert filled.reschedule("d1", countdown=5000)
        return hold(self, *args)

    monkeypatch.setattr(Redirect, "_hold", change_first)
    found = filled.redirect_many(Query(queue="celery"), "other")
    assert (found.matched, found.changed) == (3, 1)
    assert where(filled)["other"] == ["d2", "there"]
    changed, moved = filled.get("d0"), filled.get("d1")
    assert changed is not None
    assert changed.args == "(99,)"
    assert moved is not None
    assert moved.remaining is not None
    assert 4900 < moved.remaining.total_seconds() <= 5000


@pytest.mark.parametrize("state", ["delayed", "ready"])
def test_what_is_changed_while_others_move(
    filled: Delayed, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the task whose turn it is is held: a cancelled one does not come back."""
    put, moved = Channel._put, []

    def change_others(self: Any, queue: str, payload: Any, **options: Any) -> None:
        monkeypatch.undo()
        moved.append(payload["headers"]["id"])
        first, second = (f"{state[0]}{n}" for n in range(3) if f"{state[0]}{n}" not in moved)
        assert filled.cancel(first)
        assert filled.reschedule(second, countdown=5000)
        put(self, queue, payload, **options)

    monkeypatch.setattr(Channel, "_put", change_others)
    found = filled.redirect_many(Query(queue="celery", state=state), "other")
    assert (found.matched, found.changed) == (3, 1)
    assert where(filled)["other"] == sorted([*moved, "there"])
    (stays,) = (info for info in filled.find(queue="celery") if info.id.startswith(state[0]))
    assert stays.remaining is not None
    assert 4900 < stays.remaining.total_seconds() <= 5000


@pytest.mark.parametrize("queue", ["other", "third"])
def test_two_at_once(
    filled: Delayed, bench: Bench, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read the same tasks. One moves the task that the other one is moving, too."""
    bench.send("third", queue="third")
    put, counts, infos = Channel._put, [], [*filled.find(queue="celery")]
    due = {info.id: info.due_ms for info in filled.find()}

    def start_another(self: Any, *args: Any, **options: Any) -> None:
        monkeypatch.undo()
        counts.append(Redirect(filled, queue).delayed("celery", infos))
        put(self, *args, **options)

    monkeypatch.setattr(Channel, "_put", start_another)
    counts.append(filled.redirect_many(Query(queue="celery"), "other").changed)
    assert counts == [2, 1]
    found = where(filled)
    assert sorted(id for ids in found.values() for id in ids if id[0] == "d") == ["d0", "d1", "d2"]
    assert "d0" in found["other"]
    assert {info.id: info.due_ms for info in filled.find()} == due


@pytest.mark.parametrize("state", ["delayed", "ready"])
def test_the_clock_of_this_machine_does_not_matter(
    filled: Delayed, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = time() - 3600
    monkeypatch.setattr(module, "time", lambda: late, raising=False)
    assert filled.redirect_many(Query(queue="celery", state=state), "other").changed == 3
    monkeypatch.undo()
    found = where(filled)
    assert len(found["celery"]) == 3
    assert len(found["other"]) == 4


def test_one_whose_answer_was_lost_is_in_the_other_queue_only(
    filled: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, lost = Channel._put, [True]

    def loses(self: Any, *args: Any, **options: Any) -> None:
        put(self, *args, **options)
        if lost and lost.pop():
            raise OperationalError("its answer is lost")

    monkeypatch.setattr(Channel, "_put", loses)
    assert filled.redirect_many(Query(queue="celery"), "other").changed == 3
    assert where(filled) == {
        "celery": ["r0", "r1", "r2"],
        "other": ["d0", "d1", "d2", "there"],
    }


def test_one_that_is_due_soon_is_sent_once(
    filled: Delayed, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have run by the time of a second send."""
    bench.send("soon", 30)
    put, count = Channel._put, [0]

    def loses(self: Any, *args: Any, **options: Any) -> None:
        put(self, *args, **options)
        count[0] += 1
        raise OperationalError("its answer is lost")

    monkeypatch.setattr(Channel, "_put", loses)
    with pytest.raises(OperationalError, match="task soon stays in queue 'celery', and may be in"):
        filled.redirect("soon", "other")
    assert count == [1]


def test_a_ready_one_whose_answer_was_lost_is_named(
    filled: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, *args: Any, **options: Any) -> None:
        raise OperationalError("its answer is lost")

    monkeypatch.setattr(Channel, "_put", fails)
    with pytest.raises(OperationalError, match="task r0 stays in queue 'celery', and may be in"):
        filled.redirect_many(Query(queue="celery", state="ready"), "other")
    monkeypatch.undo()
    assert where(filled)["celery"] == ["d0", "d1", "d2", "r0", "r1", "r2"]


@pytest.mark.parametrize("conflict", ["refuse", "replace", "debounce"])
def test_a_task_is_not_moved_onto_another_one_with_its_key(
    filled: Delayed, bench: Bench, conflict: str
) -> None:
    once = {"delayed_unique": "k", "delayed_conflict": conflict}
    bench.send("one", 500, headers=once)
    bench.send("two", 700, queue="other", headers=once)
    due = {info.id: info.due_ms for info in filled.find()}
    assert not filled.redirect("one", "other")
    assert {info.id: info.due_ms for info in filled.find()} == due
    assert where(filled)["other"] == ["there", "two"]


@pytest.mark.parametrize("countdown", [None, -60])
def test_a_ready_one_that_stays_is_not_older_for_it(
    open_app: OpenApp, countdown: float | None
) -> None:
    app = open_app(DropOlder("1h"))
    app.amqp.queues.add("other")
    once = {"delayed_unique": "k"}
    app.send_task("record", task_id="two", queue="other", countdown=700, headers=once)
    app.send_task("record", task_id="one", countdown=countdown, headers=once)
    assert not app.delayed.redirect("one", "other")
    info = app.delayed.get("one")
    assert (info.queue, info.state) == ("celery", "ready")
    assert take(app).headers["id"] == "one"


def test_by_id(filled: Delayed) -> None:
    for id in ("d1", "r1", "there"):
        assert filled.redirect(id, "other")
    assert not filled.redirect("nobody", "other")
    assert not filled.redirect("d0", "other", queue="third")
    assert where(filled) == {"celery": ["d0", "d2", "r0", "r2"], "other": ["d1", "r1", "there"]}


@pytest.mark.crash
@pytest.mark.parametrize("moment", ["_put", "cancel"])
@pytest.mark.parametrize("state", ["delayed", "ready"])
def test_killed_on_the_way(filled: Delayed, state: str, moment: str) -> None:
    """The second task was not sent, or was sent and not dropped."""
    dues = {info.id: info.due_ms or 0 for info in filled.find()}
    filled.close()
    child = get_context("fork").Process(target=_die, args=(filled, state, moment))
    child.start()
    child.join(60)
    assert child.exitcode == 9
    ids = {"delayed": ["d0", "d1", "d2"], "ready": ["r0", "r1", "r2"]}[state]
    found = where(filled)
    assert found["other"] == sorted([*ids[: 1 if moment == "_put" else 2], "there"])
    assert ids[0] not in found["celery"]
    assert {*ids[1:]} <= {*found["celery"]}
    for info in filled.find(queue="celery"):
        due_ms = max(dues.get(info.id, 0) + 1, (time() + 60) * 1000)
        assert (info.due_ms or 0) <= due_ms


@pytest.mark.parametrize("state", ["delayed", "ready"])
def test_ctrl_c_on_the_way(filled: Delayed, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """The task whose answer was awaited stayed in both queues, and ran twice."""
    put = Channel._put

    def interrupted(self: Any, *args: Any, **options: Any) -> None:
        put(self, *args, **options)
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Channel, "_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        filled.redirect_many(Query(queue="celery", state=state), "other")
    found = where(filled)
    assert sorted(id for ids in found.values() for id in ids) == [
        "d0",
        "d1",
        "d2",
        "r0",
        "r1",
        "r2",
        "there",
    ]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c(filled: Delayed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker may never answer."""
    count = [0]

    def hangs(self: Any, *args: Any, **options: Any) -> None:
        while count[0] < 2:
            count[0] += 1
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Channel, "_put", hangs)
    with pytest.raises(KeyboardInterrupt):
        filled.redirect("d1", "other")
    monkeypatch.undo()
    assert where(filled)["celery"] == ["d0", "d1", "d2", "r0", "r1", "r2"]


def _die(delayed: Delayed, state: str, moment: str) -> None:
    owner: Any = Channel if moment == "_put" else Backlog
    inner, calls = getattr(owner, moment), [0]

    def dies(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            os._exit(9)
        return inner(*args, **options)

    setattr(owner, moment, dies)
    delayed.redirect_many(Query(queue="celery", state=state), "other")


def test_a_slow_broker(filled: Delayed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task is kept from workers for a minute from when it is its turn."""
    held: list[int] = []
    put, now = Channel._put, [monotonic()]

    def slow(self: Any, *args: Any, **options: Any) -> None:
        (one,) = (info for info in filled.find(queue="celery") if info.id.startswith("r"))
        held.append((one.due_ms or 0) - began_ms)
        now[0] += module.HOLD_MS * 0.6 / 1000
        put(self, *args, **options)

    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monkeypatch.setattr(Channel, "_put", slow)
    began_ms = int(time() * 1000)
    filled.redirect_many(Query(queue="celery", state="ready"), "other")
    assert [int(each / module.HOLD_MS / 0.6) for each in held] == [1, 2, 3]
    monkeypatch.undo()
    assert where(filled)["celery"] == ["d0", "d1", "d2"]


def test_dead_letters(filled: Delayed) -> None:
    bury(filled)
    letters = [*filled.dead.list("celery")]
    assert len(letters) == 3
    assert Redirect(filled, "other").dead("celery", letters[:2]) == 2
    assert where(filled)["other"] == ["r0", "r1", "there"]
    assert [each.letter.id for each in filled.dead.list()] == [letters[2].letter.id]


def test_dead_letters_have_all_attempts_again(filled: Delayed, bench: Bench) -> None:
    bench.send("tried", 0, queue="third", retries=2)
    bury(filled, "third")
    assert Redirect(filled, "other").dead("third", [*filled.dead.list("third")]) == 1
    moved = filled.get("tried")
    assert moved is not None
    assert (moved.queue, moved.state, moved.headers["retries"]) == ("other", "ready", 0)


def test_where_it_cannot_go(filled: Delayed, bench: Bench) -> None:
    with pytest.raises(QueryError, match=r"no queue 'othr': did you mean 'other'\?"):
        filled.redirect_many(Query(), "othr")
    with pytest.raises(QueryError, match="to_queue is empty"):
        filled.redirect_many(Query(), "")
    assert filled.redirect_many(Query(queue="celery"), "celery").changed == 0
    bench.send("one", headers={"delayed_unique": "k"})
    bench.send("two", queue="other", headers={"delayed_unique": "k"})
    assert filled.redirect_many(Query(queue="celery"), "other").changed == 3
    assert where(filled)["celery"] == ["one", "r0", "r1", "r2"]
