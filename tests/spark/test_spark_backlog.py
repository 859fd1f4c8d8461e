from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import redis
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from celery_ext import Delayed
from celery_ext.spark import backlog
from celery_ext.spark.options import ReadOptions
from celery_ext.spark.source.columns import COLUMNS, SCHEMA, Rows
from celery_ext.spark.source.paging import Page, Place
from celery_ext.spark.source.reader import BacklogReader
from kombu_delayed.errors import OptionError
from tests.kit.spark import JAN

pytestmark = pytest.mark.thorough

MINUTE = timedelta(minutes=1)
UUID7 = "0e95dd67-9c00-7000-8000-000000000000"


def fill(delayed: Delayed, count: int, queue: str = "celery", task: str = "mail.send") -> None:
    """Schedule tasks, one a minute from January 2100 on."""
    rows = [
        (task, (n,), {}, JAN + n * MINUTE, {"task_id": f"{queue}-{n}", "queue": queue})
        for n in range(count)
    ]
    assert delayed.schedule_many(rows, progress=None).delayed == count


def ids(frame: Any) -> set[str]:
    return {row.id for row in frame.select("id").collect()}


def test_columns(spark: SparkSession, url: str, delayed: Delayed, client: redis.Redis) -> None:
    delayed.app.send_task(
        "mail.send",
        ("é",),
        {"to": 1},
        task_id=UUID7,
        eta=JAN + timedelta(microseconds=1500),
        priority=5,
        headers={"tenant": "acme", "n": [1]},
    )
    assert backlog(spark, broker=url, queues="none").collect() == []
    [row] = backlog(spark, broker=url).collect()
    assert row.asDict().keys() == COLUMNS.keys()
    record = client.hget("{celery}:messages", UUID7)
    assert record is not None
    assert row.payload == record[record.index(b"{") :]
    found = row.id, row.task, row.queue, row.tenant, row.priority, row.deliveries
    assert found == (UUID7, "mail.send", "celery", "acme", 5, 0)
    assert (row.args_preview, row.kwargs_preview) == ("('é',)", "{'to': 1}")
    headers = {name: json.loads(text) for name, text in row.headers.items()}
    assert headers == json.loads(row.payload)["headers"]
    assert client.zscore("{celery}:partitions", row.partition) is not None
    texts = backlog(spark, broker=url).select(
        *(F.date_format(name, "yyyy-MM-dd HH:mm:ss.SSSSSS") for name in ("due", "eta")),
        F.unix_millis("scheduled_at"),
    )
    assert tuple(texts.collect()[0]) == (
        "2100-01-01 00:00:00.002000",
        "2100-01-01 00:00:00.001500",
        0x0E95DD679C00,
    )


def test_all_queues_in_parallel(
    spark: SparkSession, url: str, delayed: Delayed, client: redis.Redis
) -> None:
    fill(delayed, 400)
    fill(delayed, 300, "far", "report.make")
    frame = backlog(spark, broker=url, rows_per_task=100)
    assert 5 <= frame.rdd.getNumPartitions() <= 14
    assert len(ids(frame)) == frame.count() == 700
    # With pushed filters, Spark would answer the second query with the rows of the first.
    assert [frame.where(f"queue = '{q}'").count() for q in ("celery", "far")] == [400, 300]
    twice = [row.id for row in backlog(spark, broker=url, queues=["far", "none", "far"]).collect()]
    assert sorted(twice) == sorted(f"far-{n}" for n in range(300))


@pytest.mark.parametrize("columns", [["id"], ["id", "task"]])
def test_criteria(columns: list[str], spark: SparkSession, url: str, delayed: Delayed) -> None:
    fill(delayed, 200)
    fill(delayed, 20, "far", "report.make")
    given = {"due_from": JAN + 5 * MINUTE, "due_to": "2100-01-01T02:00Z"}
    frame = backlog(spark, columns=columns, broker=url, rows_per_task=30, **given)
    late = {f"far-{n}" for n in range(5, 20)}
    assert ids(frame) == {f"celery-{n}" for n in range(5, 120)} | late
    for tasks in ("report.*", ["mail.receive", "*.make"]):
        assert ids(backlog(spark, columns=columns, broker=url, tasks=tasks, **given)) == late


def test_a_schema_of_one_s_own(spark: SparkSession, url: str, delayed: Delayed) -> None:
    fill(delayed, 3)
    reader = spark.read.format("kombu_delayed").option("broker", url)
    [row] = reader.schema("due timestamp, id string").load().orderBy("id").limit(1).collect()
    assert [*row.asDict()] == ["due", "id"]
    with pytest.raises(AnalysisException, match="backlog has no column 'ids'; it has id, task"):
        reader.schema("ids string").load().count()
    with pytest.raises(AnalysisException, match="priority of the backlog is of type int, not big"):
        reader.schema("priority bigint").load().count()
    with pytest.raises(AnalysisException, match="unknown option 'queu'; did you mean 'queue"):
        reader.option("queu", "q").load().count()
    with pytest.raises(OptionError, match="backlog has no column 'ids'"):
        backlog(spark, columns=["ids"], broker=url)


# Columns, without Spark.


def rows(*records: tuple[str, dict[str, Any]]) -> Rows:
    page = Page("q", ["1"] * len(records))
    page.places = [Place(2000 + n, id.encode()) for n, (id, _) in enumerate(records)]
    page.steps = [3] * len(records)
    page.messages = [json.dumps(message).encode() for _, message in records]
    return Rows(page)


@pytest.mark.parametrize(
    ("column", "message", "value"),
    [
        ("task", {}, ""),
        ("task", {"headers": {"task": "\ud800"}}, "\\ud800"),
        ("tenant", {"headers": {"tenant": 5}}, "5"),
        ("tenant", {"headers": {"tenant": "\ud800"}}, "\\ud800"),
        ("priority", {"properties": {"priority": 7}}, 7),
        ("priority", {"properties": {"priority": 2**40}}, 3),
        ("scheduled_at", {}, None),
        ("eta", {"headers": {"eta": "2100-01-01"}}, JAN),
        ("eta", {"headers": {"eta": "soon"}}, None),
        ("eta", {"headers": {"eta": "0001-01-01T00:00:00+05:00"}}, None),
        ("eta", {"headers": {"eta": "9999-12-31T23:59:59-05:00"}}, None),
        ("headers", {"headers": {"a": None, "b": "é", "c": [1]}}, None),
        ("deliveries", {"properties": {}, "deliveries": 10**12}, 2**31 - 1),
    ],
)
def test_values(column: str, message: dict[str, Any], value: Any) -> None:
    made = COLUMNS[column].values(rows(("a\x1f2", message)))
    [found] = made.to_pylist() if column == "headers" else made
    if column == "headers":
        value = [("a", "null"), ("b", '"\\u00e9"'), ("c", "[1]")]
    assert found == value


@pytest.mark.usefixtures("spark")
def test_what_others_wrote_stops_no_reader() -> None:
    """Arrow accepts all of it."""
    reader = BacklogReader(
        ReadOptions.parse({"broker": "delayed+redis://"}), StructType.fromDDL(SCHEMA)
    )
    headers = {"task": "\ud800", "tenant": "\udfff", "eta": "0001-01-01T00:00:00+05:00"}
    message = {"headers": headers, "properties": {"priority": 2**70}, "deliveries": 10**12}
    page = rows(("ffffffff-ffff-7000-8000-000000000000", message)).page
    page.places = [Place(2**53 - 1, place.member) for place in page.places]
    [row] = reader._batch(page, to_arrow_schema(reader.schema, timezone="UTC")).to_pylist()
    assert (row["task"], row["tenant"], row["eta"]) == ("\\ud800", "\\udfff", None)
    assert (row["priority"], row["deliveries"], row["due"].year) == (3, 2**31 - 1, 9999)
