"""Signals that tell who sends, cancels or moves tasks; the last two are in test_delayed.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import chain, group

from celery_ext import install
from celery_ext.signals import task_cancelled, task_rescheduled, task_scheduled
from tests.kit.extended import Bench, extended
from tests.kit.servers import Server


@pytest.fixture
def bench(server: Server, tmp_path: Path) -> Iterator[Bench]:
    with extended(server, tmp_path) as bench:
        yield bench


@contextmanager
def heard(signal: Any) -> Iterator[list[dict[str, Any]]]:
    """What a signal is sent with."""
    said: list[dict[str, Any]] = []

    def listen(**given: Any) -> None:
        said.append(given)

    signal.connect(listen)
    yield said
    signal.disconnect(listen)


def test_scheduled(bench: Bench) -> None:
    install(bench.app)  # once more
    eta = datetime.now(timezone.utc) + timedelta(hours=1)
    with heard(task_scheduled) as said:
        bench.app.send_task("record", task_id="a", eta=eta, queue="mail")
    (given,) = said
    assert given["sender"] == given["task"] == "record"
    assert (given["task_id"], given["eta"]) == ("a", eta.isoformat())
    assert given["routing_key"] == "mail"


def now(**ahead: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(**ahead)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 0),
        ({"countdown": 60}, 1),
        ({"countdown": -60}, 0),
        ({"eta": now(days=-1)}, 0),
        ({"eta": now(days=1).astimezone(timezone(timedelta(hours=-9)))}, 1),
        ({"eta": now(days=1).replace(tzinfo=None)}, 1),
        ({"eta": "2100-01-01T00:00:00"}, 1),
        ({"eta": "soon"}, 0),
    ],
)
def test_scheduled_is_what_is_due_later(options: dict[str, Any], count: int, bench: Bench) -> None:
    with heard(task_scheduled) as said:
        bench.app.send_task("record", **options)
    assert len(said) == count
    assert len(bench.backlog()) == count


@pytest.mark.parametrize(
    ("canvas", "count"),
    [
        (lambda part: group([part(), part(), part(countdown=None)]), 2),
        (lambda part: chain(part(), part()), 1),
    ],
)
def test_scheduled_parts(canvas: Callable[..., Any], count: int, bench: Bench) -> None:
    """Those that are sent now; a later step of a chain is sent by who has run the one before."""

    def part(countdown: float | None = 60) -> Any:
        return bench.app.signature("record", countdown=countdown)

    with heard(task_scheduled) as said:
        canvas(part).apply_async()
    assert {each["task_id"] for each in said} == bench.backlog()
    assert len(said) == count


def test_cancelled_and_rescheduled(bench: Bench) -> None:
    bench.send("a")
    bench.send("b")
    with heard(task_cancelled) as cancelled, heard(task_rescheduled) as rescheduled:
        bench.app.delayed.reschedule("a", eta="2100-01-01")
        bench.app.delayed.run_now("b")
        bench.app.control.revoke(["a", "b", "x"])
    (given,) = cancelled
    assert (given["sender"], given["info"].id) == (bench.app, "a")
    assert given["info"].eta == datetime(2100, 1, 1, tzinfo=timezone.utc)
    assert [(each["sender"], each["task_id"], each["eta"]) for each in rescheduled] == [
        (bench.app, "a", "2100-01-01T00:00:00+00:00"),
        (bench.app, "b", None),
    ]
