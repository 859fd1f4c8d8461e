"""Tasks of which only one is delayed at a time, as Celery users send them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_ext import BulkError, BulkReport, Delayed
from celery_ext.control.unique import AlreadyDelayed, UniqueTask, unique_headers
from kombu_delayed.errors import OptionError
from tests.kit.ledger import Ledger
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.workers import Worker


@pytest.fixture
def app(server: Server) -> Celery:
    return make_app(Settings(f"delayed+{server.url}"))


@pytest.fixture
def delayed(app: Celery) -> Delayed:
    return Delayed(app)


def ids(delayed: Delayed) -> list[str]:
    return [info.id for info in delayed.find()]


@pytest.mark.parametrize("conflict", ["refuse", "replace", "debounce"])
def test_headers(conflict: str, app: Celery, delayed: Delayed) -> None:
    headers = unique_headers("user 7", conflict)
    first = app.send_task("record", countdown=60, headers=headers)
    before = delayed.get(first.id)
    if conflict == "refuse":
        with pytest.raises(AlreadyDelayed, match="'user 7'") as caught:
            app.send_task("record", countdown=90, headers=headers)
        assert caught.value.task_id == first.id
        expected = first.id
    else:
        second = app.send_task("record", countdown=90, headers=headers)
        expected = first.id if conflict == "debounce" else second.id
    assert ids(delayed) == [expected]
    after = delayed.get(expected)
    assert before is not None
    assert after is not None
    assert (after.due_ms == before.due_ms) == (conflict == "refuse")


def test_a_conflict_that_is_none(app: Celery, delayed: Delayed) -> None:
    with pytest.raises(ValueError, match="refuse, replace, debounce, not 'drop'"):
        unique_headers("k", "drop")
    wrong = {"delayed_unique": "k", "delayed_conflict": "drop"}
    with pytest.raises(OptionError, match="refuse, replace, debounce, not 'drop'"):
        app.send_task("record", countdown=60, headers=wrong)
    assert ids(delayed) == []


@pytest.mark.parametrize("taken", [False, True])
def test_a_restored_task_holds_its_key_again(
    taken: bool, app: Celery, delayed: Delayed, client: redis.Redis, tmp_path: Path
) -> None:
    for id, key in (("a", "k"), ("b", 'say "k2"')):
        app.send_task("record", task_id=id, countdown=60, headers=unique_headers(key))
    app.send_task("record", task_id="r", countdown=60, headers=unique_headers("k3"), retries=1)
    delayed.backup(tmp_path / "file")
    client.flushall()
    if taken:
        app.send_task("record", task_id="c", countdown=60, headers=unique_headers("k"))
    for _ in range(2):
        delayed.restore(tmp_path / "file")
    for key, other in (("k", "c" if taken else "a"), ('say "k2"', "b")):
        with pytest.raises(AlreadyDelayed) as caught:
            app.send_task("record", countdown=60, headers=unique_headers(key))
        assert caught.value.task_id == other
    app.send_task("record", task_id="d", countdown=60, headers=unique_headers("k3"))
    assert set(ids(delayed)) == {"a", "b", "d", "r"} | ({"c"} if taken else set())


def test_base_class(app: Celery, delayed: Delayed) -> None:
    @app.task(base=UniqueTask)
    def report(user: int, style: str = "short") -> None: ...

    calls: list[tuple[Any, Any]] = [((1,), {}), ((2,), {}), ((1,), {"style": "long"})]
    first, *_ = [report.apply_async(args, kwargs, countdown=60) for args, kwargs in calls]
    for args, kwargs in calls:
        with pytest.raises(AlreadyDelayed):
            report.apply_async(args, kwargs, countdown=60)
    assert len(ids(delayed)) == 3
    assert delayed.cancel(first.id)
    report.apply_async((1,), countdown=60)


def test_the_order_of_members_is_no_matter(app: Celery, delayed: Delayed) -> None:
    @app.task(base=UniqueTask)
    def merge(what: dict[str, int]) -> None: ...

    merge.apply_async(({"a": 1, "b": 2},), countdown=60)
    with pytest.raises(AlreadyDelayed):
        merge.apply_async(({"b": 2, "a": 1},), countdown=60)


def test_the_error_survives_a_worker_s_pool() -> None:
    error = pickle.loads(pickle.dumps(AlreadyDelayed("k", "id1")))
    assert (error.key, error.task_id) == ("k", "id1")
    assert str(error) == "task id1 with the unique key 'k' is delayed already"
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


@pytest.mark.smoke
def test_a_retry_is_not_held_against_another_one(
    server: Server, app: Celery, delayed: Delayed, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path / "ledger")
    settings = Settings(f"delayed+{server.url}", ledger=str(ledger.path))
    headers = unique_headers("k")
    with Worker(settings, tmp_path):
        first = app.send_task("retry", (0.5, 1), countdown=0.1, headers=headers)
        ledger.wait_for(1)
        second = app.send_task("record", countdown=0.1, headers=headers)
        ledger.wait_for_all([second.id])
        ledger.wait(lambda all: sum(run["id"] == first.id for run in all) == 2, "it has run again")
