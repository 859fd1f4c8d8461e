"""Other arguments, another priority, another due time for a task while it is delayed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_ext import Delayed, QueryError
from celery_ext.app.signals import task_rescheduled
from celery_ext.tasks.body import read_body
from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.message.wait import Wait
from tests.kit.heard import heard
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app


@pytest.fixture
def app(server: Server) -> Iterator[Celery]:
    config = {"accept_content": ["json", "pickle", "yaml"]}
    with make_app(Settings(f"delayed+{server.url}", config=config)) as app:
        yield app


def shown(delayed: Delayed, id: str) -> TaskInfo:
    info = delayed.get(id)
    assert info is not None
    return info


def body(delayed: Delayed, id: str) -> list[Any]:
    return list(read_body(delayed.app, shown(delayed, id)) or ())


@pytest.mark.parametrize(
    "options", [{}, {"serializer": "pickle"}, {"compression": "gzip"}, {"priority": 3}], ids=str
)
def test_arguments(app: Celery, delayed: Delayed, options: Any) -> None:
    link = app.signature("after", (7,))
    sent = app.send_task("record", ("a",), {"n": 1}, countdown=60, link=link, **options)
    before = shown(delayed, sent.id)
    assert delayed.change(sent.id, args=["ü"], headers={"mark": 2})
    args, kwargs, embedded = body(delayed, sent.id)
    assert (list(args), kwargs) == (["ü"], {"n": 1})
    assert embedded["callbacks"][0]["task"] == "after"
    assert delayed.change(sent.id, kwargs={"m": [1, 2]})
    args, kwargs, _ = body(delayed, sent.id)
    assert (list(args), kwargs) == (["ü"], {"m": [1, 2]})
    after = shown(delayed, sent.id)
    assert (after.due_ms, after.step, after.id) == (before.due_ms, before.step, before.id)
    assert (after.args, after.kwargs, after.headers["mark"]) == ("('ü',)", "{'m': [1, 2]}", 2)


def test_what_it_waits_for(app: Celery, delayed: Delayed) -> None:
    id = app.send_task("record", ("a",), countdown=60).id
    backlog = delayed.backlog("celery")
    (waiting,) = backlog.get(id)
    text = Wait(900, "} not yet {", ("seen",)).put_into(waiting.kept.message.decode())
    assert backlog.revise(waiting, 0, text.encode(), waiting.kept.due_ms)
    assert delayed.change(id, args=["b"])
    (changed,) = backlog.get(id)
    assert Wait.in_message(changed.kept.message) == Wait(900, "} not yet {", ("seen",))
    assert changed.kept.message.count(b'"wait"') == 1
    assert delayed.change(id, countdown=120)
    (moved,) = backlog.get(id)
    assert b'"wait"' not in moved.kept.message


def test_priority_and_time(app: Celery, delayed: Delayed) -> None:
    sent = app.send_task("record", ("a",), countdown=60)
    with heard(task_rescheduled) as said:
        assert delayed.change(sent.id, priority=9, countdown=3_600)
    info = shown(delayed, sent.id)
    assert (info.priority, info.step) == (9, 9)
    assert info.eta is not None
    assert [each["eta"] for each in said] == [info.eta.isoformat()] == [info.headers["eta"]]
    assert delayed.change(sent.id, eta="2001-01-01")
    info = shown(delayed, sent.id)
    assert (info.state, info.step) == ("ready", 9)
    assert delayed.change(sent.id, priority=1)
    assert shown(delayed, sent.id).step == 0


@pytest.mark.parametrize(
    ("to", "match"),
    [
        ({}, "at least one of"),
        ({"eta": "soon"}, "'soon' is not a time"),
        ({"eta": "2030-01-01", "countdown": 1}, "either countdown"),
        ({"priority": "high"}, "'high'"),
        ({"args": "abc"}, "'abc'"),
        ({"args": b"abc"}, "b'abc'"),
        ({"kwargs": []}, "dict of arguments"),
        ({"headers": ["tenant"]}, "dict of headers"),
        ({"headers": {"id": "another"}}, "cannot change the id"),
        ({"headers": {"tenant": object()}}, "not JSON serializable"),
    ],
)
def test_wrong_changes(delayed: Delayed, to: Any, match: str) -> None:
    with pytest.raises(QueryError, match=match):
        delayed.change("a", **to)


@pytest.mark.parametrize("to", [{"args": [object()]}, {"kwargs": {"n": object()}}])
def test_arguments_that_cannot_be_written(app: Celery, delayed: Delayed, to: Any) -> None:
    sent = app.send_task("record", ("old",), countdown=60)
    before = delayed.get(sent.id)
    with pytest.raises(QueryError, match=r"cannot be written: .*not JSON serializable"):
        delayed.change(sent.id, **to)
    assert delayed.get(sent.id) == before


def test_arguments_that_cannot_be_read(app: Celery, delayed: Delayed) -> None:
    sent = app.send_task("record", (object,), countdown=60, serializer="pickle")
    app.conf.accept_content = ["json"]
    before = delayed.get(sent.id)
    with pytest.raises(QueryError, match="python-serialize"):
        delayed.change(sent.id, args=[1])
    assert delayed.get(sent.id) == before
    assert delayed.change(sent.id, priority=6)


def test_somebody_else_changes_it_meanwhile(app: Celery, delayed: Delayed) -> None:
    sent = app.send_task("record", ("a",), countdown=60)
    others = iter([100, 200])

    def accepts(info: Any) -> bool:
        if seconds := next(others, None):
            delayed.reschedule(sent.id, countdown=seconds)
        return True

    assert delayed.change(sent.id, args=["new"], accepts=accepts)
    info = shown(delayed, sent.id)
    assert info.remaining is not None
    assert 150 < info.remaining.total_seconds() < 201
    assert info.args == "('new',)"
    seconds = itertools.count(300)
    with pytest.raises(QueryError, match="other programs keep changing it"):
        delayed.change(
            sent.id,
            args=["x"],
            accepts=lambda info: delayed.reschedule(sent.id, countdown=next(seconds)),
        )
