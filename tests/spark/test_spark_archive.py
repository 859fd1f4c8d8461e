"""The archive of lifecycle events: each event is in it once, even if a job was killed."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow.dataset
import pytest
import redis
from pyspark.sql import DataFrame, DataFrameReader, SparkSession

from celery_ext.spark.events import (
    ArchiveError,
    Compacted,
    archive_lock,
    compact,
    compact_archive,
    compaction,
    log_events,
    read_archive,
    watch,
)
from celery_ext.spark.events.archive_files import Files, spelled
from celery_ext.spark.events.archive_lock import COMPACTING, ArchiveLock, CompactionLock
from celery_ext.spark.events.stream import EventOptions
from kombu_delayed.errors import OptionError
from tests.kit.claims import full
from tests.kit.spark import Run
from tests.kit.told import told

pytestmark = pytest.mark.thorough


@pytest.fixture
def tell(client: redis.Redis) -> Callable[[int], None]:
    """Write this many events, a minute apart, in two queues."""
    count = 0

    def write(number: int) -> None:
        nonlocal count
        with client.pipeline() as pipeline:
            for _ in range(number):
                count += 1
                fields = told(f"m{count}", due_ms=count, consumer="w:1:a")
                queue, id = ("q", "r")[count % 2], f"{count * 60_000}-0"
                pipeline.xadd(f"{{{queue}}}:events", fields, id=id)
            pipeline.execute()

    return write


Log = Callable[..., int]


@pytest.fixture
def log(spark: SparkSession, url: str, tmp_path: Path) -> Log:
    def to_the_end(**options: Any) -> int:
        options = {"path": str(tmp_path / "archive"), **options}
        return watch(log_events(spark, url, **options), lambda more: None)

    return to_the_end


def numbers(path: Path) -> list[int]:
    """The events as found by a reader that knows nothing of Spark."""
    found = pyarrow.dataset.dataset(path, partitioning="hive").to_table(columns=["id"])
    return sorted(int(id[1:]) for id in found["id"].to_pylist())


def test_what_is_new_is_added(log: Log, tell: Any, tmp_path: Path, spark: SparkSession) -> None:
    path = tmp_path / "archive"
    tell(50)
    assert log(max_rows_per_trigger=20) == 50
    tell(10)
    assert log() == 10
    assert log() == 0
    assert numbers(path) == list(range(1, 61))
    assert sorted(each.name for each in path.glob("[!_]*")) == [f"batch={n:08d}" for n in range(4)]
    files = [each.relative_to(path).parts for each in path.glob("batch=*/**/*.parquet")]
    assert {(day[:5], queue[:6]) for _, day, queue, _ in files} == {("date=", "queue=")}
    frame = read_archive(spark, str(path))
    assert frame.count() == 60
    row = frame.where("id = 'm7'").first()
    assert row is not None
    times = row.at.timestamp(), row.due.timestamp()
    assert (row.queue, times, row.worker) == ("r", (420, 0.007), "w")


def test_a_queue_with_the_name_of_no_name(
    log: Log, client: redis.Redis, tmp_path: Path, spark: SparkSession
) -> None:
    """Spark has this name for directories of null, also in merged batches and in a copy."""
    path, queue = str(tmp_path / "archive"), "__HIVE_DEFAULT_PARTITION__"
    for n in range(3):
        client.xadd(f"{{{queue}}}:events", told(f"m{n}", due_ms=1, consumer="w:1:a"))
    log(max_rows_per_trigger=1)
    compact_archive(spark, path)
    compact(read_archive(spark, path), f"{tmp_path}/copy")
    for place in (path, f"{tmp_path}/copy"):
        assert read_archive(spark, place).where(f"queue = '{queue}'").count() == 3


@pytest.mark.crash
def test_a_job_that_was_killed(log: Log, tell: Any, tmp_path: Path) -> None:
    """Batch 1 was written and its end not recorded; another batch was written in part."""
    path = tmp_path / "archive"
    tell(50)
    log(max_rows_per_trigger=30)
    for name in ("1", ".1.crc"):
        (path / "_checkpoint" / "commits" / name).unlink()
    shutil.copytree(path / "batch=00000000", path / "batch=00000002")
    (path / "batch=00000002" / "_SUCCESS").unlink()
    (path / "batch=00000002" / "_temporary" / "0").mkdir(parents=True)
    tell(5)
    assert log() == 5
    assert numbers(path) == list(range(1, 56))


@pytest.mark.crash
@pytest.mark.parametrize("sizes", [[20], [20, 10]])
def test_a_batch_whose_events_are_trimmed_since_stays(
    log: Log, tell: Any, tmp_path: Path, client: redis.Redis, sizes: list[int]
) -> None:
    """The batch was written, and the job was killed before it could record that."""
    path, last = tmp_path / "archive", len(sizes) - 1
    for size in sizes:
        tell(size)
        log()
    for name in (f"{last}", f".{last}.crc"):
        (path / "_checkpoint" / "commits" / name).unlink()
    for queue in "qr":
        client.xtrim(f"{{{queue}}}:events", 3, approximate=False)
    tell(4)
    log(fail_on_data_loss=False)
    assert numbers(path) == list(range(1, sum(sizes) + 5))


def test_one_job_at_a_time(
    log: Log,
    tell: Any,
    url: str,
    client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(archive_lock, "PATIENCE_SECONDS", 0.0)
    tell(10)
    other = ArchiveLock(EventOptions.parse({"broker": url}), str(tmp_path / "archive"))
    with pytest.raises(ArchiveError, match=r"another job writes the archive .*: .*, process \d+"):
        log()
    assert log(path=str(tmp_path / "elsewhere")) == 10
    other.free()
    assert log() == 10
    assert client.keys("kombu-delayed-archive:*") == []


def test_a_full_server_can_be_archived(url: str, client: redis.Redis) -> None:
    """Its workers continue, and events that nobody archives are trimmed."""
    with full(client):
        lock = ArchiveLock(EventOptions.parse({"broker": url}), "a")
        [key] = client.keys("kombu-delayed-archive:*")
        client.pexpire(key, 1000)
        assert lock._said(15) == ""
        assert client.pttl(key) > 1000
        lock.free()
    assert not client.exists(key)


def test_a_job_that_has_lost_its_lock_stops(
    url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job stood still for longer than its lease, and another one took over."""
    monkeypatch.setattr(archive_lock, "RENEW_SECONDS", 0.0)
    monkeypatch.setattr(archive_lock, "LOOK_SECONDS", 0.01)
    lock, stopped = ArchiveLock(EventOptions.parse({"broker": url}), "a"), threading.Event()
    [key] = client.keys("kombu-delayed-archive:*")
    assert 14_000 < client.pttl(key) <= 15_000
    client.set(key, "another", px=15_000)
    lock.keep(lambda: not stopped.is_set(), stopped.set)
    assert stopped.wait(60)
    assert client.get(key) == b"another"


def test_an_archive_is_not_overwritten(log: Log, tell: Any, tmp_path: Path) -> None:
    tell(10)
    log(checkpoint=str(tmp_path / "mine"))
    for other in (None, str(tmp_path / "other")):
        with pytest.raises(ArchiveError, match=r"there is no checkpoint at .* give another path"):
            log(checkpoint=other)
    assert log(checkpoint=str(tmp_path / "mine")) == 0
    assert numbers(tmp_path / "archive") == list(range(1, 11))
    (tmp_path / "bare" / "_ranges").mkdir(parents=True)
    with pytest.raises(ArchiveError, match="there is no checkpoint at"):
        log(path=str(tmp_path / "bare"))


@pytest.mark.parametrize("name", ["events[1]", "{a,b}", "a*"])
def test_paths_in_which_spark_finds_nothing(
    name: str, log: Log, tmp_path: Path, spark: SparkSession
) -> None:
    path = str(tmp_path / name)
    for given in ({"path": path}, {"checkpoint": path}):
        with pytest.raises(ArchiveError, match="with which Spark would read it as a pattern"):
            log(**given)
    with pytest.raises(OptionError, match="with which Spark would read it as a pattern"):
        compact(spark.range(1), path)
    assert not list(tmp_path.iterdir())


def test_a_compact_copy(log: Log, tell: Any, tmp_path: Path, spark: SparkSession) -> None:
    tell(3_000)
    log(max_rows_per_trigger=1_000)
    frame, copy = read_archive(spark, str(tmp_path / "archive")), str(tmp_path / "copy")
    for _ in range(2):
        compact(frame, copy)
    assert sorted(
        str(each.parent.relative_to(copy)) for each in Path(copy).glob("date=*/queue=*/*.parquet")
    ) == [f"date=1970-01-0{day}/queue={queue}" for day in (1, 2, 3) for queue in "qr"]
    again = read_archive(spark, copy)
    assert again.schema == frame.schema
    assert again.count() == 3_000
    assert again.exceptAll(frame).count() == 0


def test_a_copy_replaces_all_of_an_older_copy(
    log: Log, tell: Any, tmp_path: Path, spark: SparkSession
) -> None:
    """Also in a session that replaces only the partitions that it writes."""
    tell(10)
    log()
    frame, copy = read_archive(spark, str(tmp_path / "archive")), str(tmp_path / "copy")
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    try:
        for events in (frame, frame.where("queue = 'q'")):
            compact(events, copy)
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
    assert {row.queue for row in read_archive(spark, copy).collect()} == {"q"}


def test_a_copy_replaces_no_archive(
    log: Log, tell: Any, tmp_path: Path, spark: SparkSession
) -> None:
    tell(10)
    log()
    archive = str(tmp_path / "archive")
    frame = read_archive(spark, archive)
    (tmp_path / "link").symlink_to(archive)
    for target in (
        archive,
        f"{archive}/",
        f"file:{archive}",
        f"{tmp_path}/link",
        f"{tmp_path}",
        "/",
    ):
        with pytest.raises(OptionError, match="has the archive that is copied, and would be"):
            compact(frame, target)
    for name in ("_checkpoint", "batch=00000000", "copy"):
        with pytest.raises(OptionError, match="is in the archive that is copied"):
            compact(frame, f"{archive}/{name}")
    assert read_archive(spark, archive).count() == 10


def test_an_archive_does_not_begin_in_a_copy(
    log: Log, tell: Any, tmp_path: Path, spark: SparkSession
) -> None:
    tell(10)
    log()
    compact(read_archive(spark, str(tmp_path / "archive")), str(tmp_path / "copy"))
    with pytest.raises(ArchiveError, match=r"copy has a compact copy of an archive: give another"):
        log(path=str(tmp_path / "copy"))


@pytest.mark.parametrize(
    ("path", "other"),
    [
        ("/tmp/a", "/tmp/a/"),
        ("/tmp/a", "file:///tmp/a"),
        ("/tmp/a", "file:/tmp/b/../a"),
        ("a", f"{os.getcwd()}/a"),
        ("s3a://bucket/a", "s3a://bucket/a/"),
        ("s3a://bucket", "s3a://bucket/"),
    ],
)
def test_spellings_of_one_path(path: str, other: str) -> None:
    assert spelled(path) == spelled(other)


def found(spark: SparkSession, path: Path) -> list[int]:
    """The events as `read_archive` finds them."""
    return sorted(int(row.id[1:]) for row in read_archive(spark, str(path)).collect())


def directories(path: Path) -> list[str]:
    return sorted(each.name.removeprefix("batch=") for each in path.glob("batch=*"))


def test_new_batches_are_merged(log: Log, tell: Any, tmp_path: Path, spark: SparkSession) -> None:
    """All but the newest one, which a job that was killed would write again."""
    path = tmp_path / "archive"
    tell(50)
    log(max_rows_per_trigger=10)
    assert compact_archive(spark, str(path)) == Compacted(4, 0)
    assert directories(path) == ["00000000-00000003", "00000004"]
    tell(20)
    log(max_rows_per_trigger=10)
    assert found(spark, path) == numbers(path) == list(range(1, 71))
    assert compact_archive(spark, str(path)) == Compacted(2, 0)
    assert compact_archive(spark, str(path)) == Compacted(0, 0)
    assert directories(path) == ["00000000-00000003", "00000004-00000005", "00000006"]
    assert found(spark, path) == numbers(path) == list(range(1, 71))
    assert len([*path.glob("batch=00000000-00000003/**/*.parquet")]) == 2


@pytest.mark.crash
def test_a_merge_that_was_killed(
    log: Log, tell: Any, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each event counts once, before the range is noted and after, and the next merge cleans up."""
    path, all_ = tmp_path / "archive", list(range(1, 41))
    tell(40)
    log(max_rows_per_trigger=10)
    shutil.copytree(path / "batch=00000001", path / "batch=00000000-00000001")
    assert found(spark, path) == all_

    monkeypatch.setattr(Files, "delete", lambda self, name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compact_archive(spark, str(path))
    assert "00000000-00000002" in directories(path)
    assert len(directories(path)) == 6
    assert found(spark, path) == all_
    monkeypatch.undo()
    assert compact_archive(spark, str(path)) == Compacted(0, 0)
    assert directories(path) == ["00000000-00000002", "00000003"]
    assert found(spark, path) == numbers(path) == all_


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_merge_that_ends_while_an_archive_is_listed(
    is_listed: bool,
    log: Log,
    tell: Any,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader does not leave out the batches of a range whose files it has not listed."""
    path, list_files, merges = tmp_path / "archive", DataFrameReader.parquet, [compact_archive]
    tell(40)
    log(max_rows_per_trigger=10)

    def listing(reader: DataFrameReader, *paths: str) -> DataFrame:
        if not paths[0].endswith("batch=*"):
            return list_files(reader, *paths)
        files = list_files(reader, *paths) if is_listed else None
        for merge in (merges.pop() for _ in [*merges]):
            assert merge(spark, str(path)) == Compacted(3, 0)
        return files or list_files(reader, *paths)

    monkeypatch.setattr(DataFrameReader, "parquet", listing)
    assert found(spark, path) == list(range(1, 41))


def test_one_merge_at_a_time(
    log: Log, tell: Any, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_lock, "PATIENCE_SECONDS", 0.0)
    path, all_ = tmp_path / "archive", list(range(1, 41))
    tell(40)
    log(max_rows_per_trigger=10)
    other = CompactionLock(Files(spark, str(path)), str(path))
    with pytest.raises(ArchiveError, match=r"another job compacts the archive .*, process \d+"):
        compact_archive(spark, str(path))
    assert len(directories(path)) == 4
    other.free()

    write = compaction._write
    for said in ("another\n1", None):  # it stood still, and another merge is running, or has ended

        def stands_still(events: Any, place: str, said: str | None = said) -> None:
            write(events, place)
            other = Files(spark, str(path))
            other.write(COMPACTING, said) if said else other.delete(COMPACTING)

        monkeypatch.setattr(compaction, "_write", stands_still)
        with pytest.raises(ArchiveError, match="another job has compacted the archive meanwhile"):
            compact_archive(spark, str(path))
        assert not (path / "_ranges").exists()
        assert found(spark, path) == all_
        assert (path / COMPACTING).exists() == bool(said)
        Files(spark, str(path)).delete(COMPACTING)
    monkeypatch.setattr(compaction, "_write", write)
    assert compact_archive(spark, str(path)) == Compacted(3, 0)
    assert found(spark, path) == numbers(path) == all_
    assert not (path / COMPACTING).exists()


def test_two_merges_that_begin_at_once(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find the archive free, and both take it; only one of them works on it."""
    monkeypatch.setattr(archive_lock, "PATIENCE_SECONDS", 0.0)
    both, path, taken = threading.Barrier(2), str(tmp_path), []

    class Meeting(CompactionLock):
        has_met = False

        def _found(self) -> str | None:
            seen = super()._found()
            if not self.has_met:
                self.has_met = True
                both.wait(60)
            return seen

    def take() -> None:
        with suppress(ArchiveError):
            taken.append(Meeting(Files(spark, path), path))

    threads = [threading.Thread(target=take) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(taken) == 1
    taken[0].check()


@pytest.mark.crash
@pytest.mark.parametrize("left", [b"", b"\0\3a\n1"])
def test_a_merge_after_one_that_was_killed(
    left: bytes,
    log: Log,
    tell: Any,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The note of the killed merge, whole or in part, stays the same for a lease."""
    monkeypatch.setattr(archive_lock, "LEASE_SECONDS", 0.0)
    tell(30)
    log(max_rows_per_trigger=10)
    (tmp_path / "archive" / COMPACTING).write_bytes(left)
    assert compact_archive(spark, str(tmp_path / "archive")) == Compacted(2, 0)


def test_days_that_are_kept(
    log: Log, tell: Any, tmp_path: Path, run: Run, spark: SparkSession
) -> None:
    path = tmp_path / "archive"
    tell(3_000)
    log(max_rows_per_trigger=1_000)
    given = "compact", "--archive", str(path)
    assert run(*given, "--path", "x", "--keep-days", "1").exit_code == 2
    # These events are from 1970.
    assert run(*given, "--keep-days", "1").stdout == "2 batches merged, 4 days of queues deleted\n"
    assert directories(path) == ["00000002"]
    assert numbers(path) == list(range(2_001, 3_001))
    assert compact_archive(spark, str(path), keep_days=10**6) == Compacted(0, 0)
    with pytest.raises(ArchiveError, match="or only a compact copy"):
        compact_archive(spark, str(tmp_path))


@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Asia/Tokyo"])
def test_days_are_those_of_utc(
    zone: str, log: Log, client: redis.Redis, tmp_path: Path, spark: SparkSession
) -> None:
    """In any time zone of the session, so that no event is deleted too early."""
    path, hour = tmp_path / "archive", 3_600_000
    for n, at in enumerate((24 * hour - 1, 24 * hour, 48 * hour - 1, 48 * hour)):
        fields = told(f"m{n}", due_ms=1, consumer="w:1:a")
        client.xadd("{q}:events", fields, id=f"{at}-0")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        log(max_rows_per_trigger=1)
        done = compact_archive(spark, str(path), keep_days=1, today=date(1970, 1, 3))
        assert done == Compacted(3, 1)
        assert found(spark, path) == [1, 2, 3]
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_what_is_being_written_is_not_forgotten() -> None:
    """The archive has begun another batch while its copy was compacted."""
    there = {
        "batch=*": ["batch=00000000-00000001", "batch=00000002", "batch=00000003"],
        "batch=00000000-00000001/date=*": ["date=2020-01-01"],
        "batch=00000000-00000001/date=2020-01-01/queue=*": ["queue=a", "queue=b"],
    }
    files: Any = SimpleNamespace(names=lambda pattern: there.get(pattern, []), delete=Mock())
    assert compaction._forget(files, "batch=00000002", date(2021, 1, 1)) == 2
    assert [each.args[0] for each in files.delete.call_args_list] == [
        "batch=00000000-00000001/date=2020-01-01",
        "batch=00000000-00000001",
    ]
