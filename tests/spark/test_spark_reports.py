"""Reports on small histories with known answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from celery_ext.spark.reports import queries
from tests.kit.histories import at, happened

pytestmark = pytest.mark.thorough

Make = Callable[..., DataFrame]


@pytest.fixture
def deliveries(spark: SparkSession) -> Make:
    """The deliveries of messages from their histories by id."""

    def make(*histories: Mapping[str, str], **more: str) -> DataFrame:
        return queries.deliveries(happened(spark, dict(*histories, **more)))

    return make


def values(frame: DataFrame, *names: str) -> list[tuple[Any, ...]]:
    return in_order([tuple(r) for r in frame.select(*names).collect()])


def in_order(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(rows, key=lambda row: [str(value) for value in row])


def ran(due: float, late: float, **more: str) -> str:
    """The history of a message that is acked two seconds after its delivery."""
    changes = "".join(f" {name}={value}" for name, value in more.items())
    begin = due + late
    return f"-10 scheduled due={due}{changes}, {begin} delivered, {begin + 2} acked"


def naive(seconds: float) -> datetime:
    """A time as in Spark's rows: in the time zone of this process."""
    return at(seconds).astimezone().replace(tzinfo=None)


def test_a_delivery(deliveries: Make) -> None:
    history = "-100 scheduled due=5, -50 rescheduled due=10, 10.25 delivered, 13.25 acked"
    (found,) = deliveries(a=history).collect()
    assert found.asDict() == {
        **{"queue": "q", "id": "a", "task": "mail", "tenant": "", "due": naive(10)},
        **{"scheduled_at": naive(-50), "delivered_at": naive(10.25), "ended_at": naive(13.25)},
        **{"consumer": "w1@host:1:aa", "worker": "w1@host", "attempt": 1, "deliveries": 0},
        **{"ended": "acked", "lateness_seconds": 0.25, "run_seconds": 3.0, "hour": naive(0)},
    }


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ("1 delivered due=none, 2 acked", [(1, None, 1.0, "acked")]),
        ("1 delivered", [(1, 1.0, None, None)]),
        pytest.param(
            "1 delivered, 31 reclaimed, 32 delivered worker=w2, 35 acked",
            [(1, 1.0, None, "reclaimed"), (2, 32.0, 3.0, "acked")],
            id="its first worker died",
        ),
        pytest.param(
            "1 delivered, 31 reclaimed, 32 delivered worker=w2, 33 acked worker=w1",
            [(1, 1.0, None, "reclaimed"), (2, 32.0, None, None)],
            id="a zombie acks while another one runs it",
        ),
        pytest.param(
            "1 delivered, 2 scheduled due=60, 2 acked due=0, 61 delivered due=60, 65 acked",
            [(1, 1.0, 1.0, "acked"), (1, 1.0, 4.0, "acked")],
            id="a retry has the same id and another due time",
        ),
        pytest.param(
            "1 delivered, 1 waiting, 4 delivered, 6 acked",
            [(1, 4.0, 2.0, "acked")],
            id="it had to wait for a limit",
        ),
        pytest.param(
            "1 delivered due=none, 1 parked due=4, 5 delivered, 5 parked due=9, 9 delivered, "
            "10 acked",
            [(1, 0.0, 1.0, "acked")],
            id="policies delayed it",
        ),
        pytest.param(
            "1 delivered, 2 delivered queue=other, 3 acked, 5 buried queue=q",
            [(1, 1.0, None, "buried"), (1, 2.0, 1.0, "acked")],
            id="the same id in two queues",
        ),
    ],
)
def test_deliveries(history: str, expected: list[tuple[Any, ...]], deliveries: Make) -> None:
    columns = ("attempt", "lateness_seconds", "run_seconds", "ended")
    assert values(deliveries(a=history), *columns) == in_order(expected)


def test_events_of_one_instant_are_in_the_stream_s_order(deliveries: Make) -> None:
    """Their numbers are compared, not the texts of the numbers."""
    nine = ", ".join(["0 released"] * 9)
    assert values(deliveries(x=nine, a="0 delivered, 0 acked"), "ended") == [("acked",)]


@pytest.fixture
def busy(deliveries: Make) -> DataFrame:
    """A hundred messages that are 0 to 99 s late, and one without a due time."""
    told = {f"m{n:02}": ran(3600.0 * (n // 50), n) for n in range(100)}
    return deliveries(told, now="1 delivered due=none").cache()


def test_lateness(busy: DataFrame) -> None:
    marks = ("messages", "p50_seconds", "p95_seconds", "p99_seconds", "max_seconds")
    assert values(queries.lateness(busy), *marks) == [(100, 49.0, 94.0, 98.0, 99.0)]
    by_hour = queries.lateness(busy, "queue", "hour")
    assert values(by_hour, "queue", "hour", *marks) == [
        ("q", naive(0), 50, 24.0, 47.0, 49.0, 49.0),
        ("q", naive(3600), 50, 74.0, 97.0, 99.0, 99.0),
    ]
    worst = queries.worst(busy, 3).select("id", "lateness_seconds").collect()
    assert [tuple(r) for r in worst] == [("m99", 99.0), ("m98", 98.0), ("m97", 97.0)]
    for target, late in ((0, 99), (89, 10), (98.5, 1), (99, 0)):
        found = queries.later_than(busy, target, "queue")
        columns = ("queue", "messages", "late", "late_share")
        assert values(found, *columns) == [("q", 100, late, late / 100)]


def test_a_later_attempt_is_not_late_once_more(deliveries: Make) -> None:
    found = queries.lateness(deliveries(a="1 delivered, 31 released, 99 delivered"), "task")
    assert values(found, "task", "messages", "max_seconds") == [("mail", 1, 1.0)]


def test_throughput(spark: SparkSession) -> None:
    events = happened(spark, {"a": ran(10, 0), "b": ran(3600, 5), "c": "1 cancelled due=9"})
    found = queries.throughput(events, "queue")
    assert values(found, "hour", "scheduled", "delivered", "acked", "cancelled", "buried") == [
        (naive(-3600), 2, 0, 0, 0, 0),
        (naive(0), 0, 1, 1, 1, 0),
        (naive(3600), 0, 1, 1, 0, 0),
    ]


@pytest.mark.parametrize(
    ("counts", "most", "least", "gini"),
    [((4,), 4, 4, 0.0), ((2, 2, 2), 2, 2, 0.0), ((1, 3), 3, 1, 0.25), ((1, 1, 1, 5), 5, 1, 0.375)],
)
def test_evenness(
    counts: tuple[int, ...], most: int, least: int, gini: float, deliveries: Make
) -> None:
    workers = [f"w{worker}" for worker, count in enumerate(counts) for _ in range(count)]
    told = {f"m{n}": ran(0, 1, worker=worker) for n, worker in enumerate(workers)}
    (found,) = queries.evenness(deliveries(told), "queue").collect()
    assert (found.workers, found.most, found.least) == (len(counts), most, least)
    assert found.max_over_min == most / least
    assert found.gini == pytest.approx(gini)


def test_never_delivered(spark: SparkSession) -> None:
    told = {
        "done": ran(10, 0),
        "waits": "0 scheduled due=20",
        "waits for a limit": "0 scheduled due=20, 21 waiting",
        "cancelled": "0 scheduled due=20, 1 cancelled",
        "put off": "0 scheduled due=20, 1 rescheduled due=500",
        "ahead": "100 scheduled due=200",
        "replayed": "0 scheduled due=9, 9 delivered, 10 buried, 11 replayed due=20, 20 waiting",
    }
    events, columns = happened(spark, told), ("id", "scheduled_at", "overdue_seconds")
    assert values(queries.never_delivered(events), *columns) == [
        ("replayed", naive(11), 80.0),
        ("waits", naive(0), 80.0),
        ("waits for a limit", naive(0), 80.0),
    ]
    assert values(queries.never_delivered(events, at(500)), "id", "overdue_seconds") == [
        ("ahead", 300.0),
        ("put off", 0.0),
        ("replayed", 480.0),
        ("waits", 480.0),
        ("waits for a limit", 480.0),
    ]


def test_a_retry_that_was_never_delivered(spark: SparkSession) -> None:
    """The message of the failed attempt is acked after the retry was scheduled."""
    retried = "0 scheduled due=10, 10 delivered, 11 scheduled due=50, 12 acked due=10"
    told = {
        "waits": retried,
        "done": f"{retried}, 51 delivered due=50, 52 acked",
        "cancelled": f"{retried}, 13 cancelled due=50",
        "clock": "100 acked",
    }
    found = queries.never_delivered(happened(spark, told))
    assert values(found, "id", "scheduled_at", "overdue_seconds") == [("waits", naive(11), 50.0)]
