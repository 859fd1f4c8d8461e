"""Messages missed in an outage are found by their events, and scheduled again once."""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from celery_ext.spark.backup import transfer
from celery_ext.spark.backup.replaying import (
    UNTOUCHED,
    NoMessage,
    counted,
    missed,
    replay,
    replay_dead,
    spread,
)
from celery_ext.spark.backup.transfer import backup, read_backup
from celery_ext.spark.reports import queries
from kombu_delayed.errors import OptionError
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.lookup import held_ids
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.histories import at, happened, ms
from tests.kit.spark import Run, counts
from tests.kit.state import message

pytestmark = pytest.mark.thorough

STATES = (*UNTOUCHED, "unacked", "dead")

#: Histories of messages that are due in second 10, and in which state each was missed.
HISTORIES: dict[str, tuple[str, tuple[str, int | None] | None]] = {
    "clock": ("100 acked", None),
    "waits": ("0 scheduled", ("delayed", 10)),
    "later": ("0 scheduled due=101", None),
    "done": ("0 scheduled, 1 delivered, 2 acked", None),
    "cancelled": ("0 scheduled, 1 cancelled", None),
    "put off": ("0 scheduled, 1 rescheduled due=101", None),
    "put off and cancelled": ("0 scheduled, 0 rescheduled, 1 cancelled", None),
    "brought forward": ("0 scheduled due=101, 1 rescheduled due=20", ("delayed", 20)),
    "retried": (
        "0 scheduled, 1 delivered, 2 scheduled due=50, 3 acked due=10",
        ("delayed", 50),
    ),
    "retried in time": (
        "0 scheduled, 1 delivered, 2 scheduled due=50, 3 acked due=10, "
        "51 delivered due=50, 52 acked",
        None,
    ),
    "parked": ("0 delivered due=none, 0 scheduled due=10, 1 delivered, 2 acked", None),
    "given back": ("0 scheduled, 1 delivered, 2 released", ("ready", 10)),
    "lost": ("0 scheduled, 1 delivered, 2 reclaimed", ("ready", 10)),
    "begun": ("0 scheduled, 1 delivered", ("unacked", 10)),
    "begun again": ("0 scheduled, 1 delivered, 2 reclaimed, 3 delivered", ("unacked", 10)),
    "buried": ("0 scheduled, 1 delivered, 2 buried", ("dead", 10)),
    "replayed": ("0 scheduled, 1 delivered, 2 buried, 3 replayed", ("ready", 10)),
    "replayed later": (
        "0 scheduled, 1 delivered, 2 buried, 4 replayed due=60, 60 delivered, 61 acked",
        None,
    ),
    "not delayed": ("0 delivered due=none", ("unacked", None)),
    "not delayed, lost": ("0 delivered due=none, 1 reclaimed", ("ready", None)),
}


def test_missed(spark: SparkSession) -> None:
    frame = happened(spark, {id: told for id, (told, _) in HISTORIES.items()}, due=10)
    # As a number: `collect` returns times in the machine's zone, which other tests may have set.
    rows = missed(frame, states=STATES).select("id", "state", F.unix_seconds("due").alias("due"))
    expected = {id: state for id, (_, state) in HISTORIES.items() if state}
    assert {row.id: (row.state, row.due) for row in rows.collect()} == {
        id: (state, None if due is None else at(due).timestamp())
        for id, (state, due) in expected.items()
    }
    narrow = missed(frame, since=at(1), until=at(20))
    assert {row.id for row in narrow.collect()} == {
        *("waits", "given back", "lost", "replayed", "not delayed, lost")
    }
    by_state = {row.state: (row.missed, row.kept) for row in counted(narrow).collect()}
    assert by_state == {"delayed": (1, 0), "ready": (4, 0)}


def test_times_without_a_zone(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in UTC, in any zone of the machine."""
    frame = happened(spark, {"a": "0 scheduled", "clock": "100 acked"}, due=10)
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", "America/New_York")
            time.tzset()
            since, until = (at(second).replace(tzinfo=None) for second in (5, 20))
            found = missed(frame, since=since, until=until)
            overdue = queries.never_delivered(frame, as_of=until)
    finally:
        time.tzset()
    assert [row.id for row in found.collect()] == ["a"]
    assert [row.overdue_seconds for row in overdue.collect()] == [10.0]


# Replays.

MISSED = "queue string, id string, task string, due timestamp, state string, at timestamp"


def lost(spark: SparkSession, *ids: str, state: str = "delayed") -> DataFrame:
    rows = [("q", id, "mail", at(10), state, at(0)) for id in ids]
    return spark.createDataFrame(rows, MISSED)


def task(id: str) -> str:
    return message(id, headers={"id": id, "task": "mail"}, properties={"delivery_info": {}})


@pytest.fixture
def path(spark: SparkSession, store: Store, url: str, tmp_path: Path) -> str:
    """A backup of the messages a to e, of which c is a pair; then the broker loses all."""
    far = str(ms(1_000_000))
    store.schedule("q", [Entry(id, 3, task(id), far) for id in "abcde"])
    store.schedule("q", [Entry("c", 3, task("c").replace('"body":"c"', '"body":"C"'), far)])
    made = str(tmp_path / "backup")
    assert backup(spark, made, broker=url).messages == 6
    store.client.flushall()
    return made


@pytest.fixture
def saved(spark: SparkSession, path: str) -> DataFrame:
    return read_backup(spark, path)


def test_replay(
    spark: SparkSession,
    saved: DataFrame,
    store: Store,
    client: redis.Redis,
    url: str,
    tmp_path: Path,
) -> None:
    store.publish("q", [Entry("d", 0, task("d"))])
    store.schedule("q", [Entry("e", 3, task("e"), str(ms(2_000_000)))])
    gone = lost(spark, "a", "c", "d", "e", "x")
    with pytest.raises(NoMessage, match="1 of 5 messages that were missed are in no backup"):
        replay(gone, saved, broker=url)
    assert set(check_backlog(client)) == {"e"}

    rejects = tmp_path / "rejects"
    report = replay(gone, saved.union(saved), broker=url, rejects=rejects, job_id="j")
    assert (counts(report), report.queues) == ((3, 2, 1), {"q": 3})
    dues = {id: ms(10) for id in ("a", "c", "c\x1f2")}
    assert check_backlog(client) == {**dues, "e": ms(2_000_000)}
    assert [each.kept.step for each in Backlog(store, "q").get("c")] == [3, 3]
    [refused] = spark.read.json(str(rejects)).collect()
    assert refused.row.id == "x"
    assert refused.reason.startswith("it is in no backup")

    Backlog(store, "q").cancel(["a"])
    again = lost(spark, "a", "b", "c", "d", "e")
    assert counts(replay(again, saved, broker=url, job_id="j")) == (1, 5, 0)  # c is a pair
    assert set(check_backlog(client)) == {"b", "c", "c\x1f2", "e"}


def test_what_was_there_is_not_repeated_when_it_has_run(
    spark: SparkSession, saved: DataFrame, store: Store, client: redis.Redis, url: str
) -> None:
    """By the same job: a message that it has found in the broker counts as done."""
    store.publish("q", [Entry("d", 0, task("d"))])
    store.schedule("q", [Entry("e", 3, task("e"), str(ms(2_000_000)))])
    gone = lost(spark, "d", "e")
    assert counts(replay(gone, saved, broker=url, job_id="j")) == (0, 2, 0)
    client.delete("q")
    Backlog(store, "q").cancel(["e"])
    assert counts(replay(gone, saved, broker=url, job_id="j")) == (0, 2, 0)
    assert not check_backlog(client)
    assert counts(replay(gone, saved, broker=url, job_id="other")) == (2, 0, 0)


def test_a_unique_task_that_was_there_is_not_repeated(
    spark: SparkSession, client: redis.Redis, url: str, tmp_path: Path
) -> None:
    """In a queue with shards, where its key and not its id determines its place."""
    store, ids, far = Store(client, shards=4), [f"u{n}" for n in range(8)], str(ms(1_000_000))
    for id in ids:
        headers = {"id": id, "task": "t", "delayed_unique": f"key of {id}"}
        entry = Entry(id, 3, message(id, headers=headers), far)
        home = store.shards.home("q", f"key of {id}")
        assert store.schedule_unique(home, entry, f"key of {id}", "refuse")[0] == "stored"
    given = {"broker": url, "transport_options": {"delayed_shards": 4}}
    backup(spark, str(tmp_path / "made"), **given)
    saved, gone = read_backup(spark, str(tmp_path / "made")), lost(spark, *ids)
    assert counts(replay(gone, saved, **given, job_id="j")) == (0, 8, 0)
    for shard in store.shards.all("q"):
        Backlog(store, shard).cancel(ids)
    assert counts(replay(gone, saved, **given, job_id="j")) == (0, 8, 0)
    assert counts(replay(gone, saved, **given, job_id="other")) == (8, 0, 0)


def test_spread(spark: SparkSession, saved: DataFrame) -> None:
    def dues() -> dict[bytes, int]:
        rows = spread(saved, at(100), timedelta(minutes=10)).collect()
        assert all(row.due.timestamp() * 1000 == row.due_ms for row in rows)
        return {row.member: row.due_ms for row in rows}

    found = dues()
    assert all(ms(100) <= due < ms(700) for due in found.values())
    assert len(set(found.values())) > 3
    assert dues() == found
    assert {row.due_ms for row in spread(saved, at(100)).collect()} == {ms(100)}
    with pytest.raises(OptionError, match="from 0 on, not -1 day"):
        spread(saved, at(100), timedelta(days=-1))


def test_spread_from_a_time_without_a_zone(
    saved: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in UTC, as for dead letters, in any zone of the machine."""
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", "America/New_York")
            time.tzset()
            rows = spread(saved, at(100).replace(tzinfo=None))
    finally:
        time.tzset()
    assert {row.due_ms for row in rows.collect()} == {ms(100)}


def test_dead_letters(spark: SparkSession, store: Store, client: redis.Redis, url: str) -> None:
    store.publish("q", [Entry(id, 0, task(id)) for id in "abc"])
    store.deliver("q", "w", 3, 1, lease_ms=30_000)
    store.bury("q", "w", [(n + 1, id, "why", b"") for n, id in enumerate("abc")])
    assert store.dead.count("q") == 3
    dead = lost(spark, "a", "c", "x", state="dead")
    report = replay_dead(dead, broker=url)
    assert (counts(report), report.queues) == ((2, 1, 0), {"q": 2})
    assert counts(replay_dead(dead, broker=url)) == (0, 3, 0)
    assert sorted(held_ids(store, "q")) == ["a", "c"]
    assert store.dead.ids("q") == ["b"]
    assert replay_dead(lost(spark, "b"), at=at(1e9), broker=url).accepted == 1
    assert check_backlog(client) == {"b": ms(1e9)}


@pytest.mark.parametrize("is_newer_first", [True, False])
def test_a_message_in_several_backups(
    is_newer_first: bool,
    spark: SparkSession,
    run: Run,
    path: str,
    store: Store,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is taken from the newest one: its arguments may have been changed since the others."""
    archive, newer = str(tmp_path / "archive"), str(tmp_path / "newer")
    happened(
        spark, {"a": "0 scheduled", "b": "0 scheduled", "clock": "100 acked"}, due=10
    ).write.parquet(f"{archive}/batch=00000000")
    changed = task("a").replace('"body":"a"', '"body":"changed"')
    store.schedule("q", [Entry("a", 3, changed, str(ms(1_000_000)))])
    tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
    monkeypatch.setattr(transfer, "datetime", SimpleNamespace(now=lambda zone: tomorrow))
    backup(spark, newer, broker=url)
    store.client.flushall()
    first, second = (newer, path) if is_newer_first else (path, newer)
    given = ("--backup", first, "--backup", second, "--at", "2100-01-01", "--yes")
    result = run("replay", "--archive", archive, "-b", url, *given)
    assert result.stdout.splitlines()[-1] == "2 replayed, 0 already done"
    [waiting] = Backlog(store, "q").get("a")
    assert b'"body":"changed"' in waiting.kept.message


def test_command(
    spark: SparkSession,
    run: Run,
    path: str,
    store: Store,
    client: redis.Redis,
    url: str,
    tmp_path: Path,
) -> None:
    archive = str(tmp_path / "archive")
    histories = dict.fromkeys("abx", "0 scheduled")
    histories |= {"dead": "0 delivered, 1 buried", "clock": "100 acked"}
    happened(spark, histories, due=10).write.parquet(f"{archive}/batch=00000000")
    told = ("replay", "--archive", archive, "-b", url)

    result = run(*told)
    assert (result.exit_code, "give a --backup" in result.stderr) == (2, True)
    asked = (*told, "--state", "delayed", "--state", "dead", "--backup", path)
    result = run(*asked, "--dry-run", "--json")
    assert json.loads(result.stdout) == [
        {"queue": "q", "state": "dead", "missed": 1, "kept": 0},
        {"queue": "q", "state": "delayed", "missed": 3, "kept": 2},
    ]
    result = run(*asked, input="n\n")
    assert (result.exit_code, client.keys("{q}:messages")) == (1, [])
    assert ["q", "dead", "1", "0"] in [line.split() for line in result.stderr.splitlines()]

    nothing = (*asked, "--where", "false")
    result = run(*nothing)
    assert (result.exit_code, "[y/N]" in result.stderr) == (0, False)
    assert result.stdout == "0 replayed, 0 already done\n"
    assert run(*nothing, "--dry-run").stdout == "No missed message was found.\n"

    result = run(*asked, "--spread", "1h")
    assert (result.exit_code, "dead letters cannot be spread" in result.stderr) == (2, True)
    result = run(*told, "--backup", path, "--spread", "-5m")
    assert (result.exit_code, "--spread is a length of time from 0 on" in result.stderr) == (
        2,
        True,
    )
    for option, value, said in (
        ("--queues", "q,Q1", "has no queue 'Q1'; did you mean 'q'?"),
        (
            "--where",
            "queue = ",
            "--where: [PARSE_SYNTAX_ERROR] Syntax error at or near end of input",
        ),
        ("--where", "queue", 'Filter expression "queue" of type "STRING" is not a boolean'),
    ):
        result = run(*told, "--backup", path, option, value, "--yes")
        assert (result.exit_code, said in result.stderr) == (1, True)
        assert len(result.stderr.splitlines()) == 1
    narrow = ("--tasks", "ma?l,x.*", "--where", "id <> 'x'", "--queues", "q", "--yes")
    later = (*narrow, "--at", "2100-01-01", "--spread", "1h", "--job-id", "j")
    result = run(*told, "--backup", path, *later)
    assert result.stdout.splitlines()[-1] == "2 replayed, 0 already done"
    first = round(datetime(2100, 1, 1, tzinfo=timezone.utc).timestamp() * 1000)
    assert all(0 <= due - first < 3_600_000 for due in check_backlog(client).values())
    result = run(*asked, "--yes", "--job-id", "j")
    assert "1 of 3 messages that were missed are in no backup" in result.stderr
    rejects = str(tmp_path / "50% ümlauts")
    result = run(*asked, "--yes", "--job-id", "j", "--rejects", rejects, "--json")
    report = json.loads(result.stdout)
    assert (report["accepted"], report["already"], report["refused"]) == (0, 3, 1)
    assert [*Path(rejects).glob("*.json")]
    assert set(check_backlog(client)) == {"a", "b"}
