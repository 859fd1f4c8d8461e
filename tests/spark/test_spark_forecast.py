"""Forecasts from small histories, and the known load of queues."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from celery_ext.spark.reports import forecast as forecasts
from celery_ext.spark.reports.backtest import backtest
from celery_ext.spark.reports.forecast import workers_needed
from kombu_delayed.errors import OptionError

pytestmark = pytest.mark.thorough

NOW = datetime(2026, 11, 23, 9, 30, tzinfo=timezone.utc)
NEXT = datetime(2026, 11, 23, 10, tzinfo=timezone.utc)


def naive(time: datetime) -> datetime:
    return time.astimezone().replace(tzinfo=None)


Arrivals = Callable[..., DataFrame]


@pytest.fixture
def came(spark: SparkSession) -> Arrivals:
    """Makes a history from (hours before the next one, hours of notice, messages)."""

    def make(*rows: tuple[int, float, int], queue: str = "q") -> DataFrame:
        data = [(queue, NEXT - timedelta(hours=h), int(notice * 3600), n) for h, notice, n in rows]
        return spark.createDataFrame(
            data, "queue string, hour timestamp, notice int, messages long"
        )

    return make


@pytest.fixture
def known(spark: SparkSession) -> Callable[..., DataFrame]:
    """Makes a backlog from seconds after the beginning of the next hour."""

    def make(*seconds: float, queue: str = "q") -> DataFrame:
        data = [(queue, NEXT + timedelta(seconds=s)) for s in seconds]
        return forecasts.due_per_hour(spark.createDataFrame(data, "queue string, due timestamp"))

    return make


def rows(frame: DataFrame, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.orderBy("queue", "hour").select(*names).collect()]


def test_the_backlog_by_hour(known: Callable[..., DataFrame]) -> None:
    found = known(0, 0, 0.9, 59, 60, 3600)
    names = ("hour", "known", "peak_minute", "peak_second")
    assert rows(found, *names) == [
        (naive(NEXT), 5, 4, 3),
        (naive(NEXT + timedelta(hours=1)), 1, 1, 1),
    ]


def test_hours_of_a_session_that_begin_at_half_past(
    spark: SparkSession, came: Arrivals, known: Any
) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    try:
        backlog, history = known(600, 600), came(*[(n * WEEK, 0, 100) for n in (1, 2, 3)])
        found = forecasts.forecast(backlog, history, NOW, hours=1)
        assert rows(found, "known", "samples", "expected") == [(2, 3, 102.0)]
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


WEEK = 7 * 24


def test_an_hour_is_as_in_other_weeks(known: Any, came: Arrivals) -> None:
    history = came((WEEK, 0, 10), (2 * WEEK, 0, 14), (3 * WEEK, 0.5, 12), (WEEK + 1, 0, 500))
    frame = forecasts.forecast(known(5, 6), history, NOW, hours=1)
    assert rows(frame, "hour", "known", "samples", "expected") == [(naive(NEXT), 2, 3, 14.0)]


def test_what_the_backlog_would_have_is_not_counted_twice(known: Any, came: Arrivals) -> None:
    """Half an hour ahead, messages sent an hour before they are due are in the backlog already."""
    hours = [week * WEEK - hour for week in (1, 2, 3) for hour in (0, 1)]
    history = came(*((hour, notice, 10**notice) for hour in hours for notice in range(4)))
    found = rows(forecasts.forecast(known(), history, NOW, hours=2), "expected")
    assert found == [(1.0,), (11.0,)]


@pytest.mark.parametrize(
    ("days", "samples", "expected"), [(1, 23, 24 / 23), (2, 2, 24.0), (13, 13, 24.0), (15, 2, 24.0)]
)
def test_a_short_history(
    days: int, samples: int, expected: float, known: Any, came: Arrivals
) -> None:
    """With less than two weeks, each hour of the day counts; with less than two days, any hour."""
    history = came(*((24 * day, 0, 24) for day in range(1, days + 1)))
    (found,) = rows(forecasts.forecast(known(), history, NOW, hours=1), "samples", "expected")
    assert found == (samples, expected)


def test_the_interval(known: Any, came: Arrivals) -> None:
    history = came(*((week * WEEK, 0, 100 + 20 * (week % 2)) for week in range(1, 9)))
    frame = forecasts.forecast(known(1, 2, 3), history, NOW, hours=1)
    ((expected, low, high),) = rows(frame, "expected", "low", "high")
    deviation = (800 / 7 * 9 / 8) ** 0.5  # of eight samples, each 10 off, and of their mean
    assert (expected, (low + high) / 2) == (113.0, pytest.approx(113))
    assert (high - low) / 2 == pytest.approx(1.6449 * deviation, rel=1e-4)
    wide = forecasts.forecast(known(1, 2, 3), history, NOW, hours=1, confidence=0.999)
    assert rows(wide, "high")[0][0] > high


def test_no_history(known: Any, came: Arrivals) -> None:
    frame = forecasts.forecast(known(1, 3601), came(), NOW, hours=3)
    names = ("known", "samples", "expected", "low", "high")
    assert rows(frame, *names) == [(1, 0, 1.0, 1.0, 1.0)] * 2 + [(0, 0, 0.0, 0.0, 0.0)]


def test_the_notice_of_arrivals(spark: SparkSession) -> None:
    columns = "queue string, attempt int, due timestamp, scheduled_at timestamp, hour timestamp"
    hours = [(0.5, 0), (0, 0), (-0.5, 1800), (-0.49, 1800), (-30, 108_000)]
    data = [("q", 1, NEXT, NEXT + timedelta(hours=h), NEXT) for h, _ in hours]
    latest = datetime(9999, 12, 31, tzinfo=timezone.utc)
    data += [("far", 1, latest, NEXT, latest)]
    data += [("q", 2, NEXT, NEXT, NEXT), ("q", 1, NEXT, None, NEXT), ("q", 1, None, None, NEXT)]
    found = forecasts.arrivals(spark.createDataFrame(data, columns))
    found = found.where("queue = 'q'")
    assert sorted(rows(found, "notice", "messages")) == [(0, 3), (1800, 2), (108_000, 1)]


@pytest.mark.parametrize(
    ("rate", "mean", "variation", "target", "expected"),
    [
        (2, 1, 1, 0.45, 3),  # Erlang: 4/9 of the tasks wait, 4/9 s on average
        (2, 1, 1, 0.44, 4),
        (2, 1, 0, 0.23, 3),  # half of it if all run equally long
        (2, 1, 3, 0.45, 4),
        (0.9, 1, 1, 9.1, 1),
        (0.9, 1, 1, 8.9, 2),
        (1000, 2, 1, 0.001, 2083),
        (0, 1, 1, 1, 0),
        (1, None, None, 1, None),
    ],
)
def test_workers_needed(
    rate: float, mean: float, variation: float, target: float, expected: int | None
) -> None:
    assert workers_needed(rate, mean, variation, target) == expected


def test_workers(spark: SparkSession) -> None:
    columns = "queue string, hour timestamp, high double, peak_minute long, peak_second long"
    peaks = {"steady": (120, 2), "burst": (7200, 3600), "new": (120, 2)}
    data = [(queue, NEXT, 7200.0, *peak) for queue, peak in peaks.items()]
    runs = [(queue, run) for queue in ("steady", "burst") for run in (0.5, 1.5, None)]
    load = spark.createDataFrame(data, columns)
    times = forecasts.service(spark.createDataFrame(runs, "queue string, run_seconds double"))
    assert (
        rows(times.withColumn("hour", times.queue), "mean_seconds", "variation") == [(1, 0.5)] * 2
    )
    found = rows(forecasts.workers(load, times, 9), "queue", "workers")
    assert found == [("burst", 360), ("new", None), ("steady", 3)]


# Which way to forecast would have been nearest.

HOURS = 6 * WEEK


def weekly(level: Callable[[float], float], dice: random.Random) -> Callable[[int], int]:
    """Makes the messages of an hour, counted back from the next one: a weekly season and chance."""

    def messages(before: int) -> int:
        at = NEXT - timedelta(hours=before)
        season = (1 + at.hour % 12) * (2 if at.weekday() < 5 else 1)
        mean = 20 * season * level(-before / WEEK)
        return round(max(dice.gauss(mean, mean**0.5), 0))

    return messages


def off_by(found: list[tuple[float, ...]], actual: list[int]) -> float:
    pairs = zip(found, actual, strict=True)
    return sum(abs(expected - right) for (expected, *_), right in pairs) / sum(actual)


def test_growth_is_seen(known: Any, came: Arrivals) -> None:
    """A tenth more each week: the plain mean of six weeks is far too low."""
    messages = weekly(lambda weeks: 1.1**weeks, random.Random(7))
    history = came(*((hour, 0, messages(hour)) for hour in range(1, HOURS)))
    frame = forecasts.forecast(known(), history, NOW, hours=24).persist()
    [(method, error, mean_error, coverage)] = set(
        rows(frame, "method", "error", "mean_error", "coverage")
    )
    assert method in ("level", "trend")
    assert error < 0.7 * mean_error
    assert coverage == pytest.approx(0.9, abs=0.07)

    found = rows(frame, "expected", "low", "high")
    actual = [messages(-hour) for hour in range(24)]
    mean = [(sum(messages(week * WEEK - hour) for week in range(1, 6)) / 5,) for hour in range(24)]
    assert off_by(found, actual) < 0.7 * off_by(mean, actual)
    within = [low <= n <= high for (_, low, high), n in zip(found, actual, strict=True)]
    assert sum(within) >= 18


def test_the_interval_of_a_queue_with_few_messages(known: Any, came: Arrivals) -> None:
    """It is as wide as in the back-test, where a deviation of less than a message counts as one."""
    dice = random.Random(7)
    history = came(*((hour, 0, 1) for hour in range(1, 22 * 24) if dice.random() < 0.3))
    [tested] = backtest(history, NOW).collect()
    found = rows(forecasts.forecast(known(), history, NOW, hours=6), "expected", "high")
    assert tested.spread > 0.5
    assert min(high - expected for expected, high in found) == pytest.approx(tested.spread)


def test_the_plain_mean_is_used_where_it_is_nearer(known: Any, came: Arrivals) -> None:
    """Every second week has twice as many messages: the last week does not predict the next."""
    messages = weekly(lambda weeks: 2 - math.ceil(-weeks) % 2, random.Random(7))
    history = came(*((hour, 0, messages(hour)) for hour in range(1, HOURS)))
    frame = forecasts.forecast(known(), history, NOW, hours=24)
    [(method, error, mean_error)] = set(rows(frame, "method", "error", "mean_error"))
    assert method == "mean"
    assert error == mean_error > 0.1


def test_too_little_to_compare(known: Any, came: Arrivals) -> None:
    history = came(*((24 * day, 0, 24) for day in range(1, 20)))
    frame = forecasts.forecast(known(), history, NOW, hours=1)
    assert rows(frame, "method", "error", "coverage") == [("mean", None, None)]


def test_a_queue_of_the_past_does_not_stop_the_others(known: Any, came: Arrivals) -> None:
    hours = range(1, 30 * 24)
    old = came(*((hour, 0, 10) for hour in hours if hour > 9 * 24), queue="old")
    history = old.union(came(*((hour, 0, 10) for hour in hours)))
    frame = forecasts.forecast(known(), history, NOW, hours=1)
    assert rows(frame, "queue", "error", "coverage") == [("old", None, None), ("q", 0, 1)]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"hours": 10**9}, "a forecast takes 1 to 840 hours, not 1000000000"),
        ({"hours": -3}, "a forecast takes 1 to 840 hours, not -3"),
        ({"confidence": 1}, "confidence is between 0 and 1, not 1"),
    ],
)
def test_numbers_out_of_range(given: dict[str, Any], reason: str) -> None:
    nothing: Any = None  # it is not read
    with pytest.raises(OptionError, match=reason):
        forecasts.forecast_of(nothing, nothing, broker="delayed+redis://localhost:6379/0", **given)
