"""Signals that tell who sends, cancels or moves tasks; the last two are in test_delayed.py."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from celery import chain, group
from celery.signals import after_task_publish

from celery_ext import install
from celery_ext.app.signals import task_cancelled, task_rescheduled, task_scheduled
from celery_ext.control.unique import AlreadyDelayed, unique_headers
from tests.kit.extended import Bench, extended
from tests.kit.heard import heard
from tests.kit.servers import Server


def test_scheduled(bench: Bench) -> None:
    install(bench.app)  # once more
    eta = datetime.now(timezone.utc) + timedelta(hours=1)
    with heard(task_scheduled) as said:
        bench.app.send_task("record", task_id="a", eta=eta, queue="mail")
    (given,) = said
    assert given["sender"] == given["task"] == "record"
    assert (given["task_id"], given["eta"]) == ("a", eta.isoformat())
    assert given["routing_key"] == "mail"


def test_a_signal_handler_that_sends_waits_for_no_lock(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery locks a signal that has receivers, and the interrupted call may hold that lock."""
    monkeypatch.setattr(task_scheduled, "has_had_receivers", False)
    monkeypatch.setattr(after_task_publish, "receivers", [])
    install(bench.app)  # once more
    lock = MagicMock()
    monkeypatch.setattr(after_task_publish, "lock", lock)
    bench.app.send_task("record", countdown=60)
    assert len(bench.backlog()) == 1
    lock.__enter__.assert_not_called()


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
    """Only parts sent now are reported; the worker of each step sends the next step of a chain."""

    def part(countdown: float | None = 60) -> Any:
        return bench.app.signature("record", countdown=countdown)

    with heard(task_scheduled) as said:
        canvas(part).apply_async()
    assert {each["task_id"] for each in said} == bench.backlog()
    assert len(said) == count


def send_unique(bench: Bench, conflict: str, *sent: tuple[str, str]) -> dict[str, list[Any]]:
    """Send tasks with one key, each with its id and ETA; return the signals."""
    with (
        heard(task_scheduled) as scheduled,
        heard(task_cancelled) as cancelled,
        heard(task_rescheduled) as rescheduled,
    ):
        for id, eta in sent:
            bench.app.send_task(
                "record", task_id=id, eta=eta, headers=unique_headers("k", conflict)
            )
    return {
        "scheduled": [(each["task_id"], each["eta"]) for each in scheduled],
        "cancelled": [(each["info"].id, each["info"].eta.year) for each in cancelled],
        "rescheduled": [(each["task_id"], each["eta"]) for each in rescheduled],
    }


SENT = [("a", "2100-01-01T00:00:00+00:00"), ("b", "2101-01-01T00:00:00+00:00")]
THIRD = ("c", "2102-01-01T00:00:00+00:00")


def test_a_task_whose_place_is_taken(bench: Bench) -> None:
    """Its result is that of any cancelled task."""
    assert send_unique(bench, "replace", *SENT, THIRD) == {
        "scheduled": [*SENT, THIRD],
        "cancelled": [("a", 2100), ("b", 2101)],
        "rescheduled": [],
    }
    assert [bench.result(id).state for id in "abc"] == ["REVOKED", "REVOKED", "PENDING"]
    told = send_unique(bench, "replace", ("c", "2103-01-01T00:00:00+00:00"))
    assert told["cancelled"] == told["rescheduled"] == [], "it takes its own place"
    assert bench.result("c").state == "PENDING"
    assert bench.backlog() == {"c"}
    with pytest.raises(AlreadyDelayed):
        send_unique(bench, "refuse", *SENT)


def test_a_task_that_is_pushed(bench: Bench) -> None:
    past = ("d", "2001-01-01T00:00:00+00:00")
    assert send_unique(bench, "debounce", *SENT, THIRD, past, SENT[1]) == {
        "scheduled": [SENT[0], SENT[1]],
        "cancelled": [],
        "rescheduled": [("a", SENT[1][1]), ("a", THIRD[1]), ("a", past[1])],
    }
    assert bench.backlog() == {"b"}
    with heard(task_rescheduled) as said:
        bench.app.send_task("record", headers=unique_headers("k", "debounce"))
    assert [(each["sender"], each["task_id"], each["eta"]) for each in said] == [
        (bench.app, "b", None)
    ]


def test_parts_that_take_each_other_s_place(server: Server, tmp_path: Path) -> None:
    """The signal is sent when the producer is free again, as a result backend may need it."""
    with extended(server, tmp_path, broker_pool_limit=1) as bench:
        bench.app.conf.result_backend = "rpc://"
        headers = unique_headers("k", "replace")
        parts = [bench.signature("record", n).set(headers=headers, task_id=f"{n}") for n in "ab"]
        with heard(task_cancelled) as said:
            group(parts).apply_async()
        assert [each["info"].id for each in said] == ["a"]
