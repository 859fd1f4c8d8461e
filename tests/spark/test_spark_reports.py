"""Reports on small histories whose answers are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from celery_ext.spark.events.batches import SCHEMA
from celery_ext.spark.reports import queries

pytestmark = pytest.mark.thorough

START = datetime(2026, 11, 21, 9, tzinfo=timezone.utc)

#: (second it happened, event, id, second it was due or None, consumer) and what differs by name.
Told = tuple[Any, ...]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def row(number: int, told: Told, more: dict[str, Any]) -> tuple[Any, ...]:
    second, event, id, due, consumer = (*told, "")[:5]
    values = {"task": "mail", "tenant": "", "queue": "q", "deliveries": 0, "reason": "", **more}
    worker = consumer and f"{consumer}@host"
    return (
        *(f"{int(at(second).timestamp() * 1000)}-{number}", event, id),
        *(values["task"], values["tenant"], values["queue"]),
        *(None if due is None else at(due), at(second)),
        *(consumer and f"{worker}:1:aa", worker, values["deliveries"], values["reason"]),
    )


@pytest.fixture
def history(spark: SparkSession) -> Callable[..., DataFrame]:
    """A DataFrame of events; a dict at the end of a tuple gives other columns."""

    def make(*told: Told) -> DataFrame:
        rows = []
        for number, each in enumerate(told):
            more = each[-1] if isinstance(each[-1], dict) else {}
            rows.append(row(number, each[: len(each) - bool(more)], more))
        return spark.createDataFrame(rows, SCHEMA)

    return make


def values(frame: DataFrame, *names: str) -> list[tuple[Any, ...]]:
    return in_order(tuple(r) for r in frame.select(*names).collect())


def in_order(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(rows, key=lambda row: [str(value) for value in row])


def run(id: str, due: float, late: float, worker: str = "w1", **more: Any) -> Iterable[Told]:
    """A message that is scheduled, delivered and acked after two seconds."""
    for second, event in ((-10, "scheduled"), (due + late, "delivered"), (due + late + 2, "acked")):
        yield second, event, id, due, "" if event == "scheduled" else worker, more


Make = Callable[..., DataFrame]


def test_a_delivery(history: Make) -> None:
    events = history(
        (-100, "scheduled", "a", 5),
        (-50, "rescheduled", "a", 10),
        (10.25, "delivered", "a", 10, "w1"),
        (13.25, "acked", "a", 10, "w1"),
    )
    (found,) = queries.deliveries(events).collect()
    assert found.asDict() == {
        **{"queue": "q", "id": "a", "task": "mail", "tenant": "", "due": naive(10)},
        **{"scheduled_at": naive(-50), "delivered_at": naive(10.25), "ended_at": naive(13.25)},
        **{"consumer": "w1@host:1:aa", "worker": "w1@host", "attempt": 1, "deliveries": 0},
        **{"ended": "acked", "lateness_seconds": 0.25, "run_seconds": 3.0, "hour": naive(0)},
    }


def naive(seconds: float) -> datetime:
    """As Spark's rows have times: in the time zone of this process."""
    return at(seconds).astimezone().replace(tzinfo=None)


CASES: list[tuple[str, list[Told], list[tuple[Any, ...]]]] = [
    (
        "never delayed",
        [(1, "delivered", "a", None, "w1"), (2, "acked", "a", None, "w1")],
        [(1, None, 1.0, "acked")],
    ),
    ("still running", [(1, "delivered", "a", 0, "w1")], [(1, 1.0, None, None)]),
    (
        "its first worker died",
        [
            (1, "delivered", "a", 0, "w1"),
            (31, "reclaimed", "a", 0, "w1"),
            (32, "delivered", "a", 0, "w2"),
            (35, "acked", "a", 0, "w2"),
        ],
        [(1, 1.0, None, "reclaimed"), (2, 32.0, 3.0, "acked")],
    ),
    (
        "a zombie acks while another one runs it",
        [
            (1, "delivered", "a", 0, "w1"),
            (31, "reclaimed", "a", 0, "w1"),
            (32, "delivered", "a", 0, "w2"),
            (33, "acked", "a", 0, "w1"),
        ],
        [(1, 1.0, None, "reclaimed"), (2, 32.0, None, None)],
    ),
    (
        "a retry has the same id and another due time",
        [
            (1, "delivered", "a", 0, "w1"),
            (2, "scheduled", "a", 60),
            (2, "acked", "a", 0, "w1"),
            (61, "delivered", "a", 60, "w1"),
            (65, "acked", "a", 60, "w1"),
        ],
        [(1, 1.0, 1.0, "acked"), (1, 1.0, 4.0, "acked")],
    ),
    (
        "the same id in two queues",
        [
            (1, "delivered", "a", 0, "w1"),
            (2, "delivered", "a", 0, "w1", {"queue": "other"}),
            (3, "acked", "a", 0, "w1", {"queue": "other"}),
            (5, "buried", "a", 0, "w1"),
        ],
        [(1, 1.0, None, "buried"), (1, 2.0, 1.0, "acked")],
    ),
]


@pytest.mark.parametrize(("name", "told", "expected"), CASES, ids=[case[0] for case in CASES])
def test_deliveries(
    name: str, told: list[Told], expected: list[tuple[Any, ...]], history: Make
) -> None:
    found = queries.deliveries(history(*told))
    columns = ("attempt", "lateness_seconds", "run_seconds", "ended")
    assert values(found, *columns) == in_order(expected)


def test_events_of_one_instant_are_in_the_stream_s_order(history: Make) -> None:
    ten = [(0, "released", "x", 0, "w1")] * 9  # so that numbers of one and of two digits meet
    events = history(*ten, (0, "delivered", "a", 0, "w1"), (0, "acked", "a", 0, "w1"))
    assert values(queries.deliveries(events), "ended") == [("acked",)]


@pytest.fixture
def busy(history: Make) -> DataFrame:
    """A hundred messages that are 0 to 99 s late, and one that nobody minded."""
    told = [each for n in range(100) for each in run(f"m{n:02}", 3600.0 * (n // 50), n)]
    return queries.deliveries(history(*told, (1, "delivered", "now", None, "w1"))).cache()


def test_lateness(busy: DataFrame) -> None:
    marks = ("messages", "p50_seconds", "p95_seconds", "p99_seconds", "max_seconds")
    assert values(queries.lateness(busy), *marks) == [(100, 49.0, 94.0, 98.0, 99.0)]
    by_hour = queries.lateness(busy, "queue", "hour")
    assert values(by_hour, "queue", "hour", *marks) == [
        ("q", naive(0), 50, 24.0, 47.0, 49.0, 49.0),
        ("q", naive(3600), 50, 74.0, 97.0, 99.0, 99.0),
    ]


def test_a_later_attempt_is_not_late_once_more(history: Make) -> None:
    events = history(
        (1, "delivered", "a", 0, "w1"),
        (31, "released", "a", 0, "w1"),
        (99, "delivered", "a", 0, "w1"),
    )
    found = queries.lateness(queries.deliveries(events), "task")
    assert values(found, "task", "messages", "max_seconds") == [("mail", 1, 1.0)]


@pytest.mark.parametrize(("target", "late"), [(0, 99), (89, 10), (98.5, 1), (99, 0)])
def test_later_than_a_target(target: float, late: int, busy: DataFrame) -> None:
    found = queries.later_than(busy, target, "queue")
    assert values(found, "queue", "messages", "late", "late_share") == [
        ("q", 100, late, late / 100)
    ]


def test_worst(busy: DataFrame) -> None:
    found = queries.worst(busy, 3).select("id", "lateness_seconds").collect()
    assert [tuple(r) for r in found] == [("m99", 99.0), ("m98", 98.0), ("m97", 97.0)]


def test_throughput(history: Make) -> None:
    events = history(*run("a", 10, 0), *run("b", 3600, 5), (1, "cancelled", "c", 9))
    found = queries.throughput(events, "queue")
    assert values(found, "hour", "scheduled", "delivered", "acked", "cancelled", "buried") == [
        (naive(-3600), 2, 0, 0, 0, 0),
        (naive(0), 0, 1, 1, 1, 0),
        (naive(3600), 0, 1, 1, 0, 0),
    ]


def test_rates(history: Make) -> None:
    events = history(
        *run("a", 0, 1),
        (1, "delivered", "b", 0, "w1"),
        (9, "reclaimed", "b", 0, "w1"),
        (10, "delivered", "b", 0, "w1", {"deliveries": 1}),
        (11, "buried", "b", 0, "w1", {"deliveries": 1}),
        *run("c", 0, 1, queue="calm"),
    )
    found = queries.rates(queries.deliveries(events), "queue")
    columns = ("queue", "deliveries", "messages", "redelivered_rate", "dead_rate")
    assert values(found, *columns) == [("calm", 1, 1, 0.0, 0.0), ("q", 3, 2, 1 / 3, 0.5)]


@pytest.mark.parametrize(
    ("counts", "most", "least", "gini"),
    [((4,), 4, 4, 0.0), ((2, 2, 2), 2, 2, 0.0), ((1, 3), 3, 1, 0.25), ((1, 1, 1, 5), 5, 1, 0.375)],
)
def test_evenness(
    counts: tuple[int, ...], most: int, least: int, gini: float, history: Make
) -> None:
    told = [
        each
        for worker, count in enumerate(counts)
        for n in range(count)
        for each in run(f"m{worker}-{n}", 0, 1, f"w{worker}")
    ]
    (found,) = queries.evenness(queries.deliveries(history(*told)), "queue").collect()
    assert (found.workers, found.most, found.least) == (len(counts), most, least)
    assert found.max_over_min == most / least
    assert found.gini == pytest.approx(gini)


def test_each_worker(history: Make) -> None:
    told = [*run("a", 0, 1, "w1"), *run("b", 0, 3, "w1"), (5, "delivered", "c", 0, "w2")]
    found = queries.per_worker(queries.deliveries(history(*told)))
    assert values(found, "worker", "deliveries", "run_seconds", "p95_seconds") == [
        ("w1@host", 2, 4.0, 3.0),
        ("w2@host", 1, 0.0, 5.0),
    ]


def test_never_delivered(history: Make) -> None:
    events = history(
        *run("done", 10, 0),
        (0, "scheduled", "waits", 20),
        (0, "scheduled", "cancelled", 20),
        (1, "cancelled", "cancelled", 20),
        (0, "scheduled", "put off", 20),
        (1, "rescheduled", "put off", 500),
        (100, "scheduled", "ahead", 200),
    )
    columns = ("id", "scheduled_at", "overdue_seconds")
    assert values(queries.never_delivered(events), *columns) == [("waits", naive(0), 80.0)]
    assert values(queries.never_delivered(events, at(500)), "id", "overdue_seconds") == [
        ("ahead", 300.0),
        ("put off", 0.0),
        ("waits", 480.0),
    ]
