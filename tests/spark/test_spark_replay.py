"""What an outage missed is found by its events, and scheduled again once."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from celery_ext.spark import JobReport
from celery_ext.spark.__main__ import main
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
from celery_ext.spark.events.batches import SCHEMA
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.lookup import held_ids
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.servers import Server
from tests.kit.state import message

pytestmark = pytest.mark.thorough

START = datetime(2026, 11, 21, 9, tzinfo=timezone.utc)
STATES = (*UNTOUCHED, "unacked", "dead")

#: Event, second it happened, second that it was due.
Told = tuple[str, int, int | None]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def ms(seconds: float) -> int:
    return round(at(seconds).timestamp() * 1000)


def events(spark: SparkSession, histories: dict[str, list[Told]]) -> DataFrame:
    """A DataFrame of events of the queue q."""
    rows = [
        (
            *(f"{ms(second)}-{number}", event, id, "mail", "", "q"),
            *(None if due is None else at(due), at(second), "w:1:a", "w", 0, ""),
        )
        for id, told in histories.items()
        for number, (event, second, due) in enumerate(told)
    ]
    return spark.createDataFrame(rows, SCHEMA)


def at_once(*names: str, due: int | None = 10) -> list[Told]:
    """Events from second 0 on, a second apart."""
    return [(name, second, due) for second, name in enumerate(names)]


HISTORIES: dict[str, tuple[list[Told], tuple[str, int | None] | None]] = {
    "clock": ([("acked", 100, 10)], None),
    "waits": (at_once("scheduled"), ("delayed", 10)),
    "later": (at_once("scheduled", due=101), None),
    "done": (at_once("scheduled", "delivered", "acked"), None),
    "cancelled": (at_once("scheduled", "cancelled"), None),
    "put off": ([("scheduled", 0, 10), ("rescheduled", 1, 101)], None),
    "put off and cancelled": ([("scheduled", 0, 10), *at_once("rescheduled", "cancelled")], None),
    "brought forward": ([("scheduled", 0, 101), ("rescheduled", 1, 20)], ("delayed", 20)),
    "retried": (
        [*at_once("scheduled", "delivered"), ("scheduled", 2, 50), ("acked", 3, 10)],
        ("delayed", 50),
    ),
    "retried in time": (
        [
            *at_once("scheduled", "delivered"),
            *[("scheduled", 2, 50), ("acked", 3, 10), ("delivered", 51, 50), ("acked", 52, 50)],
        ],
        None,
    ),
    "parked": ([("delivered", 0, None), *at_once("scheduled", "delivered", "acked")], None),
    "given back": (at_once("scheduled", "delivered", "released"), ("ready", 10)),
    "lost": (at_once("scheduled", "delivered", "reclaimed"), ("ready", 10)),
    "begun": (at_once("scheduled", "delivered"), ("unacked", 10)),
    "begun again": (at_once("scheduled", "delivered", "reclaimed", "delivered"), ("unacked", 10)),
    "buried": (at_once("scheduled", "delivered", "buried"), ("dead", 10)),
    "replayed": (at_once("scheduled", "delivered", "buried", "replayed"), ("ready", 10)),
    "replayed later": (
        [
            *at_once("scheduled", "delivered", "buried"),
            *[("replayed", 4, 60), ("delivered", 60, 60), ("acked", 61, 60)],
        ],
        None,
    ),
    "not delayed": (at_once("delivered", due=None), ("unacked", None)),
    "not delayed, lost": (at_once("delivered", "reclaimed", due=None), ("ready", None)),
}


def test_missed(spark: SparkSession) -> None:
    frame = events(spark, {id: told for id, (told, _) in HISTORIES.items()})
    # As a number: `collect` gives times in the machine's zone, which others may have set.
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


# Replays.

MISSED = "queue string, id string, task string, due timestamp, state string, at timestamp"


def lost(spark: SparkSession, *ids: str, state: str = "delayed") -> DataFrame:
    rows = [("q", id, "mail", at(10), state, at(0)) for id in ids]
    return spark.createDataFrame(rows, MISSED)


@pytest.fixture
def url(server: Server) -> str:
    return f"delayed+{server.url}"


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


def counts(report: JobReport) -> tuple[int, int, int]:
    return report.accepted, report.already, report.refused


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
    assert counts(replay(again, saved, broker=url, job_id="j")) == (1, 4, 0)
    assert set(check_backlog(client)) == {"b", "c", "c\x1f2", "e"}


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


# The command.

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    def invoke(*arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(main, arguments, catch_exceptions=False, **options)

    return invoke


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
    histories = {"a": at_once("scheduled"), "b": at_once("scheduled"), "x": at_once("scheduled")}
    histories["dead"] = at_once("delivered", "buried")
    histories["clock"] = [("acked", 100, 10)]
    events(spark, histories).write.parquet(f"{archive}/batch=00000000")
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

    result = run(*asked, "--spread", "1h")
    assert (result.exit_code, "dead letters cannot be spread" in result.stderr) == (2, True)
    narrow = ("--tasks", "ma?l,x.*", "--where", "id <> 'x'", "--queues", "q", "--yes")
    later = (*narrow, "--at", "2100-01-01", "--spread", "1h", "--job-id", "j")
    result = run(*told, "--backup", path, *later)
    assert result.stdout.splitlines()[-1] == "2 replayed, 0 already there or dealt with"
    first = round(datetime(2100, 1, 1, tzinfo=timezone.utc).timestamp() * 1000)
    assert all(0 <= due - first < 3_600_000 for due in check_backlog(client).values())
    result = run(*asked, "--yes", "--job-id", "j")
    assert "1 of 3 messages that were missed are in no backup" in result.stderr
    rejects = str(tmp_path / "rejects")
    result = run(*asked, "--yes", "--job-id", "j", "--rejects", rejects, "--json")
    report = json.loads(result.stdout)
    assert (report["accepted"], report["already"], report["refused"]) == (0, 3, 1)
    assert set(check_backlog(client)) == {"a", "b"}
