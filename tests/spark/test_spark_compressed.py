"""Spark writes and reads a compressed queue like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from celery_ext import Delayed
from celery_ext.spark import backlog, job_report, schedule
from celery_ext.spark.backup import backup, read_backup, restore
from kombu_delayed.message import compressing, zstd
from tests.kit.compressed import dictionary, entries, is_compressed, kept, make_large
from tests.kit.spark import JAN_MS, Run, counts, numbered
from tests.kit.state import entry

pytestmark = pytest.mark.thorough

#: A message that is in the queue from the beginning.
FIRST = entries(1, JAN_MS, seed=2)[0]
COUNT = 60


def test_a_compressed_queue(
    spark: SparkSession,
    url: str,
    delayed: Delayed,
    client: redis.Redis,
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
    assert rows["7"].args_preview.startswith("['orderorder")


@pytest.fixture
def lost(delayed: Delayed, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages, one of which is compressed with a dictionary that is lost."""
    # One that no process of Spark has seen: they keep the dictionaries that they have.
    monkeypatch.setattr(zstd, "train", lambda samples: dictionary(seed=3))
    make_large(delayed.store, "celery", JAN_MS)
    delayed.store.schedule("other", [entry("plain", JAN_MS)])
    client.delete("{celery}:dictionaries")
    compressing._codecs.clear()


@pytest.mark.usefixtures("lost")
def test_a_backup_says_what_nobody_can_read(
    spark: SparkSession, url: str, run: Run, tmp_path: Path
) -> None:
    made = backup(spark, str(tmp_path / "one"), broker=url)
    assert (made.messages, made.undecodable) == (2, 1)
    said = run("backup", str(tmp_path / "two"), "-b", url).stdout
    assert "1 of them cannot be read, now or after a restore" in said


@pytest.mark.usefixtures("lost")
def test_a_restore_and_a_copy_say_what_nobody_can_read(
    spark: SparkSession, url: str, run: Run, tmp_path: Path
) -> None:
    path, rejects = str(tmp_path / "one"), f"file://{tmp_path}/rejects"
    backup(spark, path, broker=url)
    for more in ({}, {"rejects": rejects}):
        report = restore(read_backup(spark, path), broker=url, **more)
        assert (report.already, report.undecodable) == (2, 1)
        assert job_report(report.job_id, broker=url) == report
    mail = read_backup(spark, path).where("queue = 'other'")
    assert restore(mail, broker=url).undecodable == 0
    prefix = '{"global_keyprefix": "copy-"}'
    to = ("copy", "-b", url, "--to", url, "--to-transport-options", prefix, "-y")
    for arguments in (("restore", path, "-b", url, "-y"), to):
        assert "1 of them cannot be read, now or after a restore" in run(*arguments).stdout
