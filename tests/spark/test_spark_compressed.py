"""Spark writes, reads, changes, follows and backs up a compressed queue as any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from celery_ext import Delayed
from celery_ext.spark import backlog, cancel, reschedule, schedule
from celery_ext.spark.backup.transfer import backup, read_backup, restore
from celery_ext.spark.events import log_events, read_archive, watch
from celery_ext.tasks.body import read_body
from kombu_delayed.message import compressing, zstd
from tests.kit.compressed import dictionary, entries, is_compressed, kept, make_large
from tests.kit.spark import JAN_MS, counts, numbered

pytestmark = pytest.mark.thorough

#: The one that is there from the beginning.
FIRST = entries(1, JAN_MS, seed=2)[0]
COUNT = 60


def test_a_compressed_queue(
    spark: SparkSession,
    url: str,
    delayed: Delayed,
    client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zstd, "train", lambda samples: dictionary())
    make_large(delayed.store, "celery", JAN_MS)
    client.delete("{celery}:events")
    broker = {"broker": url, "transport_options": {"delayed_compression": "zstd"}}
    words = F.to_json(F.array(F.repeat(F.lit("order"), 20), F.col("id")))

    report = schedule(numbered(spark, COUNT, args=words), job_id="j", batch_size=10, **broker)
    assert counts(report) == (COUNT, 0, 0)
    forms = [is_compressed(kept(client, f"{n}", "celery")) for n in range(COUNT)]
    assert 10 <= sum(forms) < COUNT, "all but the first batches"
    assert counts(schedule(numbered(spark, COUNT, args=words), job_id="j2", **broker)) == (
        0,
        COUNT,
        0,
    ), "they are the same, whatever form these have"

    found = backlog(spark, **broker)
    rows = {row.id: row for row in found.collect()}
    assert rows.keys() == {FIRST.id, *(f"{n}" for n in range(COUNT))}
    assert rows["7"].args_preview.startswith("('orderorder")
    assert rows[FIRST.id].payload == FIRST.message.encode()
    assert found.where("task = 'record' AND id = '7'").count() == 1

    saved = backup(spark, str(tmp_path / "backup"), **broker)
    assert saved.messages == COUNT + 1

    some = found.where(F.col("id").cast("int") < 20).select("id", "queue", "due")
    later = some.selectExpr("id", "queue", "due + INTERVAL 1 HOUR AS eta")
    assert reschedule(later, job_id="later", **broker).accepted == 20
    assert delayed.get("7").due_ms == JAN_MS + 3_600_000
    assert (read_body(delayed.app, delayed.get("7")) or ())[0] == ["order" * 20, "7"]
    assert cancel(some.drop("due"), **broker).accepted == 20
    assert found.count() == COUNT + 1 - 20

    archive = str(tmp_path / "archive")
    assert watch(log_events(spark, url, path=archive), lambda more: None) == COUNT + 20 + 20
    events = read_archive(spark, archive).where("id = '7'").orderBy("at").collect()
    assert [(each.event, each.task) for each in events] == [
        ("scheduled", "record"),
        ("rescheduled", "record"),
        ("cancelled", "record"),
    ]

    before = rows["30"].payload
    client.flushall()
    compressing._codecs.clear()
    assert restore(read_backup(spark, str(tmp_path / "backup")), **broker).accepted == COUNT + 1
    assert delayed.get("30").message == before
