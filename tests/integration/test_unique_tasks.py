"""Tasks of which only one is delayed at a time, as Celery users send them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from celery import Celery

from celery_ext import BulkError, BulkReport, Delayed
from celery_ext.control.unique import AlreadyDelayed, UniqueTask, unique_headers
from kombu_delayed.errors import OptionError
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app


@pytest.fixture
def app(server: Server) -> Celery:
    return make_app(Settings(f"delayed+{server.url}"))


@pytest.fixture
def delayed(app: Celery) -> Delayed:
    return Delayed(app)


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
