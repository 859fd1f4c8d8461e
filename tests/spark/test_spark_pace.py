"""The pace of writers: a shared rate, a broker that answers, batches of bounded size."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from celery_ext import Delayed
from celery_ext.control.bulk.schedule import schedule_many
from celery_ext.spark import cancel, reschedule, schedule
from celery_ext.spark.arrow import slices
from celery_ext.spark.options import WriteOptions
from celery_ext.spark.sink import pace as pacing
from celery_ext.spark.sink.pace import Pace
from celery_ext.spark.sink.write import BacklogWriter, batches
from kombu_delayed.store.ledgers import Job
from kombu_delayed.store.store import Store
from kombu_delayed.transport.batch import Outbox, Pipeline
from tests.kit.spark import counts, numbered

pytestmark = pytest.mark.thorough

ETA = datetime(2100, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def slept() -> list[float]:
    return []


def pace(
    store: Store,
    slept: list[float],
    clock: Callable[[], float] | None = None,
    **options: Any,
) -> Pace:
    given = WriteOptions.parse({"broker": "delayed+redis://", **options})
    return Pace(
        store, given, Job("j", "run", 100), slept.append, clock or itertools.count().__next__
    )


def test_writers_of_a_job_share_a_rate(store: Store, slept: list[float]) -> None:
    store.now = "1000000"
    given = {"max_rows_per_second": 100, "latency_budget_ms": 0}
    one, other = (pace(store, slept, **given) for _ in range(2))
    assert one.batch == 100
    assert [*one.over(range(250))] == [*range(250)]
    assert slept == [1, 2, 2.5]
    assert [*other.over(range(50))] == [*range(50)]
    assert slept[3:] == [3]
    store.now = "1010000"  # time long past needs no wait, and gives no credit
    assert [*other.over(range(10))] == [*range(10)]
    assert slept[4:] == [0.1]
    store.now = "1"  # the clock was set back
    assert [*other.over(range(10))] == [*range(10)]
    assert slept[5:] == [0.1]


def test_any_number_of_writers_share_a_rate(store: Store, slept: list[float]) -> None:
    store.now = "1000000"
    for _ in range(1_000):
        pace(store, slept, max_rows_per_second=1, latency_budget_ms=0).written(1)
    assert slept == [*range(1, 1_001)]


def test_the_key_of_a_rate_expires(store: Store, slept: list[float], client: redis.Redis) -> None:
    pace(store, slept, max_rows_per_second=1000).written(500)
    assert 60_000 < client.pttl("kombu-delayed-job:j:pace") <= 61_000  # type: ignore[operator]


def test_a_slow_broker_is_given_time(
    store: Store, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    trips = iter([0.001, 0.02, 0.03, 0.02, 0.001, 0.001, 0.001, 0.001, 0.001])
    monkeypatch.setattr(pacing, "round_trip_seconds", lambda store: next(trips))
    one = pace(store, slept, latency_budget_ms=10)
    for _ in range(9):
        one.written(1)
    assert slept[:3] == [0.005, 0.01, 0.02]
    assert slept[3:] == pytest.approx([0.014, 0.0098, 0.00686])
    one = pace(store, slept, lambda: 0.0)
    monkeypatch.setattr(pacing, "round_trip_seconds", lambda store: 0.001)
    one.written(1)
    monkeypatch.setattr(pacing, "round_trip_seconds", lambda store: pytest.fail("it looks again"))
    one.written(1)  # it has checked just now
    pace(store, slept, latency_budget_ms=0).written(1)


def test_round_trips_are_measured(store: Store) -> None:
    assert pacing.round_trip_seconds(store) > 0


def test_an_uneven_network_is_not_a_slow_broker(
    store: Store, slept: list[float], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """Answers take 1 to 5 ms without any load; the budget is on top of that."""
    dice = random.Random(3)
    monkeypatch.setattr(pacing, "round_trip_seconds", lambda store: dice.uniform(0.001, 0.005))
    jitter = pacing.jitter_seconds(store)
    assert 0.001 < jitter < 0.003
    given = WriteOptions.parse({"broker": url})
    for known in (0.0, jitter):
        slept.clear()
        one = Pace(
            *(store, given, Job("j", "run", 100), slept.append, itertools.count().__next__),
            jitter_seconds=known,
        )
        for _ in range(400):
            one.written(1)
        if known:
            assert sum(slept) < 400 * 0.003
        else:
            assert sum(slept) > 400 * 0.05
    monkeypatch.setattr(pacing, "round_trip_seconds", lambda store: 0.1)
    one.written(1)
    assert slept[-1] >= 0.005  # a slow broker still gets time


def test_the_network_is_looked_at_before_a_job_writes(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = StructType().add("id", "string").add("task", "string").add("countdown", "double")
    monkeypatch.setattr("celery_ext.spark.sink.write.jitter_seconds", lambda store: 0.25)
    for budget, known in ((1, 0.25), (0, 0.0)):
        writer = BacklogWriter(
            WriteOptions.parse({"broker": url, "latency_budget_ms": budget}), schema
        )
        writer.begin()
        assert writer.jitter_seconds == known
    ticks = iter([0.0, 0.1, 0.2, 0.3])
    trips = iter([0.1, 0.1, 0.1])
    monkeypatch.setattr(pacing, "round_trip_seconds", lambda store: next(trips))
    assert pacing.jitter_seconds(store, ticks.__next__) == 0  # it is not kept for long


def test_batches_of_bounded_size(delayed: Delayed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 1 MB are sent eight at a time, and read in slices of the same size."""
    # If another test left a receiver of signals, each row would be sent alone.
    monkeypatch.setattr("celery_ext.control.bulk.schedule._is_watched", lambda: False)
    sizes: list[int] = []
    execute = Outbox.execute

    def watched(self: Outbox) -> None:
        sizes.append(sum(map(len, self._queued.values())))
        execute(self)

    monkeypatch.setattr(Outbox, "execute", watched)
    rows = [("t", ("x" * 700_000,), {}, ETA, {"task_id": f"{n}"}) for n in range(20)]
    assert schedule_many(delayed, rows).delayed == 20
    assert sizes == [9, 9, 2]

    found = batches([("q", b"m", b"x" * 1_000_000)] * 20, 1000)
    assert [len(each) for each in found] == [8, 8, 4]
    assert [len(each) for each in batches([("q", "id", "", "")] * 5, 2)] == [2, 2, 1]
    table = pa.RecordBatch.from_pydict({"args": ["x" * 1_000_000] * 20})
    assert [each.num_rows for each in slices([table])] == [7, 7, 6]


def test_a_job_with_a_rate(spark: SparkSession, url: str, client: redis.Redis) -> None:
    frame, paced = numbered(spark, 300), {"broker": url, "max_rows_per_second": 200}
    began = client.time()
    assert counts(schedule(frame, job_id="j", **paced)) == (300, 0, 0)
    ids = frame.select("id")
    moved = reschedule(ids.withColumn("countdown", F.lit(3600)), queue="celery", **paced)
    assert moved.accepted == 300
    assert cancel(ids, queue="celery", **paced).accepted == 300
    ended = client.time()
    assert ended[0] - began[0] >= 4  # type: ignore[index]


@pytest.mark.parametrize("operation", ["cancel", "reschedule"])
def test_a_server_never_has_two_calls_of_a_change(
    url: str, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    send, sent = Pipeline.send, []

    def counting(pipeline: Pipeline, commands: list[Any], waits_for: str = "") -> None:
        unconfirmed = sum(len(lane.unconfirmed) for lane in pipeline._lanes.values())
        sent.append((unconfirmed, len(commands)))
        send(pipeline, commands, waits_for)

    monkeypatch.setattr(Pipeline, "send", counting)
    given = {"broker": url, "operation": operation, "queue": "q"}
    schema = StructType().add("id", "string").add("countdown", "double")
    rows = {"id": [f"{n}" for n in range(1_000)], "countdown": [60.0] * 1_000}
    writer = BacklogWriter(WriteOptions.parse(given), schema)
    assert writer.write(iter([pa.RecordBatch.from_pydict(rows)])).rows == 1_000
    assert sent == [(0, 1)] * 4
