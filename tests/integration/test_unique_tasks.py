"""Tasks of which only one is delayed at a time, as Celery users send them."""

from __future__ import annotations

import math
import pickle
import signal
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery, Task, states
from celery.exceptions import Reject, Retry
from celery.worker.request import Request as CeleryRequest

from celery_ext import BulkError, BulkReport, Delayed
from celery_ext.control.unique import AlreadyDelayed, UniqueTask, unique_headers
from celery_ext.policies import Backoff, DropOlder
from celery_ext.policies.times import timeout
from celery_ext.worker.requests import unique_hold
from celery_ext.worker.requests.request import Request
from celery_ext.worker.requests.unique_hold import LONGEST_MS, MARGIN_MS, WAITING_MS, UniqueHold
from kombu_delayed.consumer.outbox import Held
from kombu_delayed.errors import OptionError
from tests.kit.extended import Bench, extended
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until


@pytest.fixture
def app(server: Server) -> Celery:
    return make_app(Settings(f"delayed+{server.url}"))


def ids(delayed: Delayed) -> list[str]:
    return [info.id for info in delayed.find()]


def test_a_conflict_that_is_none(app: Celery, delayed: Delayed) -> None:
    with pytest.raises(ValueError, match="refuse, replace, debounce, not 'drop'"):
        unique_headers("k", "drop")
    wrong = {"delayed_unique": "k", "delayed_conflict": "drop"}
    with pytest.raises(OptionError, match="refuse, replace, debounce, not 'drop'"):
        app.send_task("record", countdown=60, headers=wrong)
    assert ids(delayed) == []


def test_base_class(app: Celery, delayed: Delayed) -> None:
    @app.task(base=UniqueTask)
    def report(user: Any, style: str = "short") -> None: ...

    calls: list[tuple[Any, Any]] = [((1,), {}), ((2,), {}), ((1,), {"style": "long"})]
    calls.append((({"a": 1, "b": 2},), {}))
    first, *_ = [report.apply_async(args, kwargs, countdown=60) for args, kwargs in calls]
    calls.append((({"b": 2, "a": 1},), {}))  # the order of members is no matter
    for args, kwargs in calls:
        with pytest.raises(AlreadyDelayed):
            report.apply_async(args, kwargs, countdown=60)
    assert len(ids(delayed)) == 4
    assert delayed.cancel(first.id)
    report.apply_async((1,), countdown=60)


def test_arguments_with_keys_of_several_types(app: Celery, delayed: Delayed) -> None:
    @app.task(base=UniqueTask)
    def report(mixed: Any) -> None: ...

    report.apply_async(({1: 2, "a": [{3: 4, "b": 5}]},), countdown=60)
    with pytest.raises(AlreadyDelayed):
        report.apply_async(({"a": [{"b": 5, 3: 4}], 1: 2},), countdown=60)
    report.apply_async(({1: 2, "a": [{3: 5, "b": 5}]},), countdown=60)
    assert len(ids(delayed)) == 2


def test_the_error_survives_a_worker_s_pool() -> None:
    error = pickle.loads(pickle.dumps(AlreadyDelayed("k", "id1")))
    assert (error.key, error.task_id) == ("k", "id1")
    assert str(error) == "task id1 with the unique key 'k' is delayed already, or has not ended"
    bulk = pickle.loads(pickle.dumps(BulkError("the broker failed", BulkReport(rows=7))))
    assert str(bulk) == "the broker failed"
    assert bulk.report.rows == 7


def test_base_class_with_a_key_of_its_own(app: Celery, delayed: Delayed) -> None:
    class PerUser(UniqueTask):
        abstract = True
        unique_conflict = "replace"

        def unique_key(self, args: Any, kwargs: Any) -> str:
            return f"user {args[0]}"

    @app.task(base=PerUser)
    def mail(user: int, text: str) -> None: ...

    mail.apply_async((1, "first"), countdown=60)
    last = mail.apply_async((1, "second"), countdown=60)
    assert ids(delayed) == [last.id]


HELD = "{celery}:unique-held"

of_celery_5_7 = pytest.mark.skipif(
    not hasattr(Task, "retry_on_worker_lost"), reason="Celery 5.7 has this"
)


def test_an_end_that_is_none(app: Celery, delayed: Delayed) -> None:
    with pytest.raises(ValueError, match="until takes 'finished' or None, not 'started'"):
        unique_headers("k", until="started")
    wrong = {"delayed_unique": "k", "delayed_until": "started"}
    with pytest.raises(OptionError, match="takes 'finished', not 'started'"):
        app.send_task("record", countdown=60, headers=wrong)
    assert ids(delayed) == []


def test_base_class_until_the_end(app: Celery, delayed: Delayed) -> None:
    @app.task(base=UniqueTask, unique_until="finished", shared=False)
    def alone() -> None: ...

    first = alone.delay()
    with pytest.raises(AlreadyDelayed) as raised:
        alone.delay()
    assert raised.value.task_id == first.id
    assert delayed.cancel(first.id)
    alone.delay()


def only(bench: Bench, id: str, name: str = "record", **options: Any) -> None:
    headers = unique_headers("k", until="finished")
    bench.app.send_task(name, task_id=id, headers=headers, **options)


def is_free(bench: Bench) -> bool:
    return not bench.app.delayed.store.run("EXISTS", HELD)


@pytest.mark.thorough
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_runs_has_its_key(bench: Bench, pool: str, tmp_path: Path) -> None:
    may_end = tmp_path / "may-end"
    with bench.worker(pool=pool):
        only(bench, "a", "until", args=[str(may_end)])
        wait_until(lambda: bench.ledger.of("a"), "it runs")
        with pytest.raises(AlreadyDelayed):
            only(bench, "b")
        may_end.touch()
        wait_until(lambda: is_free(bench), "its key is free")
        assert bench.result("a").get(timeout=30) is None
        only(bench, "b")
        wait_until(lambda: is_free(bench), "it has run, and its key is free")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options", "state"),
    [
        ("add", {"args": ["a", 1]}, states.FAILURE),
        ("add", {"args": ["a", 1], "policies": [Backoff([0.01])]}, states.FAILURE),
        ("retry", {"args": [0.01, 2]}, states.SUCCESS),
        ("record", {"expires": 0.001}, states.REVOKED),
        ("sleep", {"args": [60], "time_limit": 0.3}, states.FAILURE),
        ("die", {}, states.FAILURE),
        ("unspeakable", {}, states.FAILURE),
        ("unspeakable", {"policies": [Backoff([0.01])]}, states.FAILURE),
        pytest.param("die_at_the_end", {}, states.SUCCESS, marks=of_celery_5_7),
        ("record", {"policies": [DropOlder("1h")], "eta": "2020-01-01T00:00:00"}, states.REVOKED),
    ],
)
def test_each_end_frees_the_key(
    bench: Bench, name: str, options: dict[str, Any], state: str
) -> None:
    only(bench, "a", name, **options)
    assert not is_free(bench)
    with bench.worker(pool="prefork"):
        wait_until(lambda: is_free(bench), "its key is free", 60)
        wait_until(lambda: bench.result("a").state == state, f"it is {state}")


@pytest.mark.parametrize(
    ("error", "acks_late", "goes_on"),
    [
        (None, True, False),
        (ValueError(), True, False),
        (Retry(), False, True),
        (Reject("x", requeue=True), True, True),
        (Reject("x", requeue=True), False, False),  # its message was acknowledged at its start
        (Reject("x"), True, False),
    ],
)
def test_which_ends_free_the_key(
    error: Exception | None, acks_late: bool, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Held] = []
    monkeypatch.setattr(UniqueHold, "_set", lambda self, held: told.append(held))
    hold = UniqueHold.__new__(UniqueHold)
    hold._of = lambda ms: Held("q", "k", "a", ms)
    hold.ended(error, acks_late)
    assert told == ([] if goes_on else [Held("q", "k", "a", 0)])


@pytest.mark.parametrize(
    ("until", "least", "most"),
    [
        (None, 0, 0),
        (90, 90_000, 90_000),
        (-1, 0, 0),
        (math.inf, 0, 0),
        ("soon", 0, 0),
        ("2100-01-01T00:00:00", 10**12, 10**13),
        (datetime(2100, 1, 1), 10**12, 10**13),
    ],
)
def test_how_long_a_retry_keeps_the_key(
    until: Any, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery takes each of these as the time of a retry."""
    told: list[Held] = []
    monkeypatch.setattr(UniqueHold, "_set", lambda self, held: told.append(held))
    hold = UniqueHold.__new__(UniqueHold)
    hold._of = lambda ms: Held("q", "k", "a", ms)
    hold.waits(until)
    assert least <= told[0].left_ms - WAITING_MS <= most
    assert told[0].goes_on


@pytest.mark.parametrize(
    ("name", "options"),
    [("add", {"args": ["a", 1]}), ("sleep", {"args": [60], "time_limit": 0.3})],
)
def test_a_retry_keeps_the_key(bench: Bench, name: str, options: dict[str, Any]) -> None:
    with bench.worker(pool="prefork"):
        only(bench, "a", name, policies=[Backoff([3600])], **options)
        wait_until(bench.backlog, "it is to be retried")
        bench.send("after", countdown=0)
        wait_until(lambda: bench.ledger.of("after"), "what came afterwards has run")
        with pytest.raises(AlreadyDelayed):
            only(bench, "b")
        assert bench.app.delayed.cancel("a")
    only(bench, "b")


@of_celery_5_7
def test_a_retry_of_a_task_whose_process_died_keeps_the_key(server: Server, tmp_path: Path) -> None:
    with extended(server, tmp_path, task_retry_on_worker_lost=True) as bench:
        with bench.worker(pool="prefork"):
            only(bench, "a", "die")
            wait_until(bench.backlog, "it is to be retried")
            bench.send("after", countdown=0)
            wait_until(lambda: bench.ledger.of("after"), "what came afterwards has run")
        with pytest.raises(AlreadyDelayed):
            only(bench, "b")
        history = bench.app.delayed.history("a")
        assert history is not None
        assert [step.event for step in history.steps] == ["received", "started", "retrying"]
        assert [each.id for each in bench.app.delayed.recorded("failed")] == []


@pytest.mark.parametrize("headers", [{"mine": 1}, {"delayed_unique": "other"}])
def test_a_retry_with_other_headers_keeps_the_key(bench: Bench, headers: dict[str, Any]) -> None:
    with bench.worker():
        only(bench, "a", "retry_with", args=[{"headers": headers}])
        wait_until(bench.backlog, "it is to be retried")
    (retry,) = bench.app.delayed.find()
    assert retry.headers == {**retry.headers, **headers, **unique_headers("k", until="finished")}


@pytest.mark.parametrize("pool", ["solo", "prefork"])
@pytest.mark.parametrize("name", ["retry_with", "retry_late_with"])
@pytest.mark.parametrize("more", [{}, {"policies": [Backoff([3600])]}])
def test_a_retry_in_another_queue_takes_the_key_along(
    bench: Bench, pool: str, name: str, more: dict[str, Any]
) -> None:
    with bench.worker(pool=pool):
        only(bench, "a", name, args=[{"queue": "other"}], **more)
        wait_until(bench.backlog, "it is to be retried")
        wait_until(lambda: is_free(bench), "its key is free in its first queue")
    with pytest.raises(AlreadyDelayed):
        only(bench, "b", queue="other")


def test_a_task_is_replaced_by_one_with_its_key(bench: Bench) -> None:
    headers = unique_headers("k", until="finished")
    with bench.worker(pool="solo"):
        only(bench, "a", "replace_by", args=["record", headers])
        wait_until(lambda: bench.ledger.of("a"), "the task that replaces it has run")
        wait_until(lambda: is_free(bench), "its key is free")


def test_a_retry_whose_worker_has_reconnected_keeps_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Mock()
    monkeypatch.setattr(unique_hold, "own_broker", lambda app: SimpleNamespace(store=asked))
    hold = UniqueHold.__new__(UniqueHold)
    hold._app, hold._channel = None, SimpleNamespace(closed=True)
    hold._of = lambda ms: Held("q", "k", "a", ms)
    hold.waits(60)
    asked.ask.assert_called_once_with("hold", "q", entries=("k", "a", 60_000 + WAITING_MS))


@pytest.mark.parametrize("pool", ["solo", "prefork", "threads"])
def test_a_retry_keeps_the_key_for_longer_than_its_task_may_run(
    bench: Bench, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.app.delayed.store
    # The connections of this process are closed, too: each is checked before its next command.
    monkeypatch.setattr("kombu_delayed.connection.connection.IDLE_SECONDS", -1)
    with bench.worker(pool=pool):
        only(bench, "a", "add", args=["a", 1], time_limit=20, policies=[Backoff([3600])])
        wait_until(bench.backlog, "it is to be retried")
        bench.send("before", countdown=0)
        wait_until(lambda: bench.ledger.of("before"), "the worker knows of the retry")
        store.run("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        bench.send("after", countdown=0)
        wait_until(lambda: bench.ledger.of("after"), "it has connected again")
        wait_until(lambda: not bench.app.delayed.counts("celery")["celery"].unacked, "it is acked")
    (retry,) = bench.app.delayed.find()
    assert retry.due_ms is not None
    assert float(store.run("ZSCORE", "{celery}:unique-until", "k")) >= retry.due_ms


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("pool", "limit", "most"),
    [
        ("prefork", 100.0, 160),
        ("prefork", None, 86_400),
        ("threads", 100.0, 86_400),  # a pool that cannot end the task at its limit
    ],
)
def test_a_worker_that_was_killed(
    bench: Bench, tmp_path: Path, pool: str, limit: float | None, most: int
) -> None:
    store = bench.app.delayed.store
    with bench.worker(pool=pool) as worker:
        only(bench, "a", "until", args=[str(tmp_path / "never")], time_limit=limit)
        wait_until(lambda: bench.ledger.of("a"), "it runs")
        bench.send("after", countdown=3600)
        wait_until(lambda: not bench.app.delayed.counts("celery")["celery"].unacked, "it is acked")
        worker.kill()
    left = float(store.run("ZSCORE", "{celery}:unique-until", "k")) / 1000 - time.time()
    assert most - 60 < left <= most
    with pytest.raises(AlreadyDelayed):
        only(bench, "b")


@pytest.mark.parametrize(
    ("limits", "of_task", "of_worker", "seconds"),
    [
        ([5, None], 10, 20, 5),
        ([None, None], 10, 20, 10),
        (None, None, 20, 20),
        ([math.inf, None], None, None, None),
    ],
)
def test_a_task_that_is_acked_early_keeps_its_key_for_as_long_as_it_may_run(
    limits: Any, of_task: Any, of_worker: Any, seconds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Held] = []
    monkeypatch.setattr(UniqueHold, "_set", lambda self, held: told.append(held))
    monkeypatch.setitem(timeout.worker_limits, "time_limit", of_worker)
    monkeypatch.setattr(CeleryRequest, "on_accepted", lambda *given: None)
    request = Request.__new__(Request)
    request._task = SimpleNamespace(acks_late=False, time_limit=of_task)
    request.time_limits = limits or (None, None)
    request.hold = UniqueHold.__new__(UniqueHold)
    request.hold._of = lambda ms: Held("q", "k", "a", ms)
    request.on_accepted(7, 0.0)
    longest_ms = LONGEST_MS if seconds is None else seconds * 1000 + MARGIN_MS
    assert [held.left_ms for held in told] == [longest_ms]


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_cold_shutdown_frees_the_keys_of_tasks_that_do_not_return(
    bench: Bench, pool: str
) -> None:
    worker = bench.worker(pool=pool, concurrency=2)
    with worker:
        for id, name in (("a", "sleep"), ("b", "late")):
            headers = unique_headers(id, until="finished")
            bench.app.send_task(name, [60], task_id=id, headers=headers)
        wait_until(lambda: len({*bench.ledger.ids()}) == 2, "both run")
        worker.stop(signal.SIGQUIT)
    assert bench.app.delayed.store.run("HKEYS", HELD) == [b"b"]
