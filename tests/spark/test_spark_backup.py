"""A backlog to Parquet files and back: nothing is lost, doubled or changed on the way."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
import redis
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from celery_ext import BackupError, QueryError
from celery_ext.spark import connect
from celery_ext.spark.backup.transfer import (
    backup,
    copy,
    counting,
    read_backup,
    restore,
    summary,
)
from celery_ext.spark.options import WriteOptions
from celery_ext.spark.sink.backup_rows import VERSION, BackupRows
from kombu_delayed.errors import OptionError
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.restoring import kept
from tests.kit.spark import JAN_MS, Run, counts
from tests.kit.state import all_keys, entry, message

pytestmark = pytest.mark.thorough

QUEUES = {"mail": 303, "q": 2}


@pytest.fixture
def filled(store: Store) -> Store:
    """A broker with everything a backlog may contain, some of it due already."""
    many = [entry(f"m{n}", JAN_MS + n * 1000, step=(0, 3, 9)[n % 3]) for n in range(300)]
    store.schedule("mail", many)
    twins = [entry("twin", JAN_MS, body=body) for body in ("one", "two")]
    store.schedule("mail", [*twins, entry("never", 300_000_000_000_000)])
    text = message("ü\ud800", headers={"delayed_unique": "k", "id": "é", "task": "t"})
    store.schedule_unique("q", Entry("é", 0, text, str(JAN_MS)), "k", "refuse")
    store.schedule("q", [entry("a", "+1")])
    return store


def records(client: redis.Redis, prefix: str = "") -> dict[str, dict[bytes, bytes]]:
    """The data in Redis of each message, and of unique keys, byte for byte."""
    return {
        f"{queue} {name}": client.hgetall(f"{prefix}{{{queue}}}:{name}")  # type: ignore[misc]
        for queue in QUEUES
        for name in ("messages", "unique", "duplicates")
    }


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "backup")


@pytest.fixture
def saved(spark: SparkSession, filled: Store, url: str, path: str) -> DataFrame:
    backup(spark, path, broker=url)
    return read_backup(spark, path)


def test_there_and_back(
    spark: SparkSession, filled: Store, client: redis.Redis, url: str, path: str
) -> None:
    before = records(client)
    made = backup(spark, path, broker=url)
    assert made == summary(spark, path)
    assert (made.version, made.messages, made.queues) == (VERSION, 305, QUEUES)
    assert made.server.startswith("delayed+redis://127.0.0.1")

    client.flushall()
    rows = read_backup(spark, path)
    report = restore(rows, broker=url, job_id="j")
    assert (counts(report), report.queues) == ((305, 0, 0), QUEUES)
    with counting(QUEUES, broker=url, job_id="j") as count:
        assert count() == 305 + 2 * len(QUEUES)
    assert records(client) == before
    assert {queue: len(check_backlog(client, queue)) for queue in QUEUES} == QUEUES
    held = filled.schedule_unique("q", entry("b", JAN_MS), "k", "refuse")
    assert held == ("refused", "é")

    assert counts(restore(rows, broker=url)) == (0, 305, 0)
    Backlog(filled, "mail").cancel(["m1", "m2"])
    assert counts(restore(rows, broker=url, job_id="j")) == (0, 305, 0)
    assert counts(restore(rows, broker=url, job_id="other")) == (2, 303, 0)
    assert records(client) == before


def test_what_another_shard_had_is_not_repeated_when_it_has_run(
    spark: SparkSession, store: Store, client: redis.Redis, url: str, path: str
) -> None:
    """By the same job, after the queue was spread over more shards."""
    store.schedule("q", [entry(f"t{n}", JAN_MS) for n in range(20)])
    backup(spark, path, broker=url)
    rows = read_backup(spark, path)
    given = {"broker": url, "transport_options": {"delayed_shards": 4}, "job_id": "j"}
    assert counts(restore(rows, **given)) == (0, 20, 0)
    Backlog(store, "q").cancel([f"t{n}" for n in range(20)])
    assert counts(restore(rows, **given)) == (0, 20, 0)
    assert not check_backlog(client)
    assert counts(restore(rows, **{**given, "job_id": "other"})) == (20, 0, 0)


def test_a_copy_in_another_layout(
    spark: SparkSession, filled: Store, client: redis.Redis, url: str
) -> None:
    layout = {"global_keyprefix": "b-", "delayed_partition_size": 16}
    target = {"broker": url, "transport_options": layout}
    before = records(client)
    assert counts(copy(spark, {"broker": url}, target)) == (305, 0, 0)
    assert records(client, "b-") == before == records(client)
    assert client.zcard("b-{mail}:partitions") > 2 * client.zcard("{mail}:partitions")


# Refused backups.


def change_summary(path: str, change: Callable[[str], str]) -> None:
    [part] = Path(path, "_summary").glob("part-*")
    text = change(part.read_text())
    Path(path, "_summary", f".{part.name}.crc").unlink(missing_ok=True)
    part.write_text(text)


def test_what_is_no_whole_backup(
    spark: SparkSession, saved: DataFrame, url: str, path: str, client: redis.Redis
) -> None:
    change_summary(path, lambda text: text.replace('"messages": 305', '"messages": 305 '))
    read_backup(spark, path)

    change_summary(path, lambda text: text.replace('"version": 1', '"version": 2'))
    with pytest.raises(BackupError, match="has version 2 of the format, and this program knows 1"):
        read_backup(spark, path)
    change_summary(path, lambda text: text[1:])
    with pytest.raises(BackupError, match="_summary is damaged: Extra data"):
        read_backup(spark, path)
    change_summary(path, lambda text: "{" + text.replace('"version": 2', '"version": 1'))

    next(Path(path).glob("part-*.parquet")).unlink()
    with pytest.raises(BackupError, match=r"messages where it had 305: files are missing.*queue"):
        read_backup(spark, path)

    shutil.rmtree(f"{path}/_summary")
    with pytest.raises(BackupError, match=r"no whole backup at .*: _summary, which is"):
        read_backup(spark, path)


def test_large_messages(spark: SparkSession, store: Store, url: str, path: str) -> None:
    """Parquet keeps few of them in memory at a time, also among the first hundred."""
    chance = random.Random(1)
    texts = [entry(f"{n}", JAN_MS, body=chance.randbytes(50_000).hex()) for n in range(30)]
    store.schedule("q", texts)
    conf = spark._jsc.hadoopConfiguration()
    conf.set("parquet.block.size", "500000")
    try:
        backup(spark, path, broker=url)
    finally:
        conf.unset("parquet.block.size")
    [file] = Path(path).glob("part-*.parquet")
    assert pyarrow.parquet.ParquetFile(file).num_row_groups > 2


def test_what_is_there_is_not_overwritten(
    spark: SparkSession, saved: DataFrame, filled: Store, url: str, path: str
) -> None:
    with pytest.raises(BackupError, match=r"there is something at .*: give another path"):
        backup(spark, path, broker=url)
    Backlog(filled, "mail").cancel([f"m{n}" for n in range(300)])
    made = backup(spark, path, broker=url, overwrite=True, queues="mail")
    assert made.queues == {"mail": 3}
    for queues in ("mial", "mail,mial"):
        with pytest.raises(QueryError, match="no queue 'mial': did you mean 'mail'"):
            backup(spark, path, broker=url, overwrite=True, queues=queues)
        with pytest.raises(QueryError, match="no queue 'mial': did you mean 'mail'"):
            copy(spark, {"broker": url, "queues": queues}, {"broker": url})
    assert read_backup(spark, path).count() == 3


# Rows, without Spark.

GOOD: dict[str, Any] = {
    "version": VERSION,
    "queue": "q",
    "member": b"a",
    "step": 3,
    "due_ms": 1000,
    "payload": message("a").encode(),
}


def read(*rows: dict[str, Any], **options: Any) -> tuple[list[Any], list[str]]:
    """The restored rows, and the reasons why others are refused."""
    refused: list[str] = []
    batch = pyarrow.RecordBatch.from_pylist(list(rows))
    given = WriteOptions.parse({"broker": "delayed+redis://", "operation": "restore", **options})
    found = BackupRows([batch], given, lambda row, reason: refused.append(reason))
    return list(found), refused


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"queue": None}, "it has no queue, no member or no payload"),
        ({"payload": None}, "it has no queue, no member or no payload"),
        ({"payload": b"[1]"}, "its payload is not a message"),
        ({"step": 99}, "step 99 or due_ms 1000 is none"),
        ({"due_ms": -1}, "step 3 or due_ms -1 is none"),
        ({"queue": "r"}, "queue 'r' is not among the option queues: q"),
    ],
)
def test_rows_refused(change: dict[str, Any], reason: str) -> None:
    found, refused = read(GOOD, {**GOOD, **change}, GOOD, queues="q")
    assert found == [("q", b"a", kept(message("a"), 1000, 3).encode())] * 2
    assert [each[: len(reason)] for each in refused] == [reason]


def test_a_batch_with_a_row_of_another_version() -> None:
    with pytest.raises(BackupError, match="has version None of the format"):
        read(GOOD, {**GOOD, "version": None})


@pytest.mark.parametrize(
    ("columns", "option", "reason"),
    [
        ("version int", {"key_columns": "id"}, "takes neither key_columns nor"),
        ("version int", {"queue": "q"}, "takes neither key_columns nor"),
        ("version int, queue string, member string", {}, "backup .* and member is of type"),
    ],
)
def test_what_cannot_be_restored(
    columns: str, option: dict[str, str], reason: str, spark: SparkSession, url: str
) -> None:
    with pytest.raises((OptionError, AnalysisException), match=reason):
        restore(spark.createDataFrame([], columns), broker=url, **option)


def test_commands(
    run: Run,
    filled: Store,
    client: redis.Redis,
    url: str,
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = records(client)
    result = run("backup", path, "-b", url)
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["queue", "delayed"],
        ["mail", "303"],
        ["q", "2"],
        [],
        ["305", "tasks", "are", "in", path],
    ]
    assert "there is something at" in run("backup", path, "-b", url).stderr
    for name in ("[1]", "a*", "{a}"):
        assert "read it as a pattern" in run("backup", f"{path}/{name}", "-b", url).stderr
    client.flushall()

    result = run("restore", path, "-b", url, "--dry-run", "--json", "--queues", "q, no")
    told = json.loads(result.stdout)
    assert (told["messages"], told["queues"]) == (305, {"q": 2})
    assert result.stderr == f"Warning: the backup at {path} has no queue 'no'; it has mail, q\n"
    result = run("restore", path, "-b", url, "-y", "--queues", "mial,no")
    assert "has none of the queues mial, no: it has mail, q" in result.stderr
    for queues in ("[mail", ",", "mail,"):
        result = run("restore", path, "-b", url, "-y", "--queues", queues)
        assert f"{queues!r} is not a list of names: separate" in result.stderr
    monkeypatch.setitem(connect.PATIENT, "max_retries", 1)
    result = run("restore", path, "-b", "delayed+redis://127.0.0.1:1/0", "-y")
    assert ("Error 111" in result.stderr, "--job-id" in result.stderr) == (True, False)
    result = run("restore", path, "-b", url, input="n\n")
    assert result.exit_code == 1
    assert "Restore 305 tasks? [y/N]: n" in result.stderr
    assert all_keys(client) == []

    result = run("restore", path, "-b", url, "--yes", "--queues", "q")
    assert result.stdout.splitlines()[-1] == "2 restored, 0 already done"
    rejects = str(tmp_path / "rejects")
    result = run("restore", path, "-b", url, "-y", "--json", "--rejects", rejects)
    assert json.loads(result.stdout)["queues"] == {"mail": 303, "q": 0}
    assert records(client) == before

    for given, missing in (
        ("-b", "give the target broker by"),
        ("--to", "give the broker to copy"),
    ):
        result = run("copy", given, url, "--yes")
        assert (result.exit_code, missing in result.stderr) == (2, True)
    result = run("copy", "-b", url, "--to", url, "--yes")
    assert result.stdout.endswith("\n0 restored, 305 already done\n")
