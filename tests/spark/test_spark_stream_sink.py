"""Batches of a streaming query become messages, each once, wherever the query was stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StructType

from celery_ext.spark import JobReport, job_report
from celery_ext.spark.data_source import DefaultSource
from celery_ext.spark.sink.stream_write import BatchWritten, StreamWriter
from kombu_delayed.errors import OptionError
from tests.kit.backlog import check_backlog
from tests.kit.servers import available_kinds, start_server
from tests.kit.spark import start_when_awaited

pytestmark = pytest.mark.thorough

SCHEMA = "id string, task string, eta string"

Run = Callable[..., StreamingQuery]


@pytest.fixture
def come(tmp_path: Path) -> Callable[..., None]:
    """Add a file of rows with these ids, which will be a batch."""
    directory, count = tmp_path / "source", 0
    directory.mkdir()

    def add(*ids: str, eta: str = "2100-01-01") -> None:
        nonlocal count
        count += 1
        rows = [json.dumps({"id": id, "task": "work", "eta": eta}) for id in ids]
        (directory / f"{count}.json").write_text("\n".join(rows))

    return add


@pytest.fixture
def run(spark: SparkSession, url: str, tmp_path: Path) -> Run:
    """Run a query from its checkpoint to the end of the available files."""

    def to_the_end(**options: Any) -> StreamingQuery:
        files = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        writer = files.json(str(tmp_path / "source")).writeStream.format("kombu_delayed")
        query = (
            writer.option("broker", url)
            .options(**options)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .queryName("reminders")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return query

    return to_the_end


def forget_end_of(batch: int, tmp_path: Path) -> None:
    """Act as if the query had been killed between the last row and the checkpoint."""
    for name in (f"{batch}", f".{batch}.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()


def run_all(client: redis.Redis) -> None:
    """Act as workers do: only the ledger is left."""
    for key in client.keys("*"):
        if b":job:" not in key:
            client.delete(key)


def test_a_query_goes_on_at_its_checkpoint(
    run: Run, come: Any, url: str, client: redis.Redis, tmp_path: Path
) -> None:
    come("a", "b")
    come("c")
    query = run()
    assert set(check_backlog(client, "celery")) == {"a", "b", "c"}
    assert job_report(f"{query.id}/0", broker=url) == JobReport(
        f"{query.id}/0", 2, 0, 0, {"celery": 2}
    )
    run_all(client)
    forget_end_of(1, tmp_path)
    come("d", "a")
    assert run().id == query.id
    assert set(check_backlog(client, "celery")) == {"d", "a"}
    assert [job_report(f"{query.id}/{n}", broker=url).accepted for n in (1, 2)] == [1, 2]  # type: ignore[union-attr]
    until_ms = client.zscore("{celery}:ledgers-until", f"{{celery}}:job:{query.id}/2")
    assert time.time() < until_ms / 1000 <= time.time() + 86_400


def test_a_job_over_all_batches(run: Run, come: Any, url: str, client: redis.Redis) -> None:
    come("a")
    come("a", "b", eta="2100-02-01")
    run(job_id="j")
    assert set(check_backlog(client, "celery")) == {"a", "b"}
    assert job_report("j", broker=url) == JobReport("j", 1, 1, 0, {"celery": 1})


def test_a_batch_that_failed_half_way(
    run: Run, come: Any, client: redis.Redis, tmp_path: Path
) -> None:
    rejects = tmp_path / "rejects"
    come("a", "b", "", "c")
    with pytest.raises(StreamingQueryException, match="1 rows are refused, and max_rejects is 0"):
        run(batch_size=1)
    assert set(check_backlog(client, "celery")) <= {"a", "b"}
    run_all(client)
    for _ in range(2):
        run(rejects=str(rejects))
        assert [json.loads(each.read_text())["row"]["id"] for each in rejects.iterdir()] == [""]
        forget_end_of(0, tmp_path)
    assert "c" in check_backlog(client, "celery")
    ledger = {id for id in client.hkeys("{celery}:job:" + _job(client)) if id[:1] != b"\x1f"}
    assert ledger == {b"a", b"b", b"c"}


def _job(client: redis.Redis) -> str:
    [key] = client.keys("{celery}:job:*")
    return key.decode().removeprefix("{celery}:job:")


# Without a query.


def writer(url: str, **options: str) -> StreamWriter:
    schema = StructType.fromDDL(SCHEMA)
    return StreamWriter({"broker": url, "checkpointLocation": "x", **options}, schema)


@pytest.mark.usefixtures("spark")
def test_a_batch_that_nobody_tells_of(url: str) -> None:
    with pytest.raises(OptionError, match="does not provide the query and the number"):
        writer(url).write(iter([]))


@pytest.mark.usefixtures("spark")
def test_a_backlog_is_not_overwritten(url: str) -> None:
    with pytest.raises(OptionError, match="is not overwritten: use outputMode"):
        DefaultSource({"broker": url}).streamWriter(StructType.fromDDL(SCHEMA), True)


@pytest.mark.usefixtures("spark")
def test_a_query_waits_for_its_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a batch, and before its end."""
    with start_server(available_kinds()[0], tmp_path, port=0) as server:
        start_when_awaited(server, monkeypatch)
        server.kill()
        broker = f"delayed+{server.url}"
        made = writer(broker)
        server.kill()
        made.commit([BatchWritten(query="q")], 3)
        assert job_report("q/3", broker=broker) == JobReport("q/3")
