"""Files of rows, scheduled, cancelled and rescheduled at the command line."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from celery_ext.spark.__main__ import main
from celery_ext.spark.commands.files import format_of
from celery_ext.spark.commands.progress import Stages
from kombu_delayed.errors import OptionError
from kombu_delayed.store.store import Store
from tests.kit.backlog import check_backlog
from tests.kit.servers import Server

pytestmark = pytest.mark.thorough

Run = Callable[..., Result]

LINES = """\
{"id": 7, "task": "t", "args": [1, {"x": null}], "kwargs": {"a": 1}, "eta": "2100-01-01"}
{"id": "b", "task": "t", "kwargs": {"b": [2]}, "countdown": 1e9, "priority": 3, "queue": "far"}
{"id": "bad", "task": "t", "kwargs": 1, "eta": "2100-01-01"}
"""

CSV = """\
user,task,args,countdown,priority
007,t,"[1, ""x""]",1e9,9
008,t,,1e9,
"""


@pytest.fixture
def run(spark: SparkSession, server: Server) -> Run:
    def invoke(job: str, path: Path, *arguments: str) -> Result:
        given = (job, str(path), "-b", f"delayed+{server.url}", *arguments)
        return CliRunner().invoke(main, given, catch_exceptions=False)

    return invoke


def body(client: redis.Redis, id: str, queue: str = "celery") -> Any:
    record = client.hget(f"{{{queue}}}:messages", id)
    assert isinstance(record, bytes)
    payload = json.loads(record[record.index(b"{") :])
    return json.loads(base64.b64decode(payload["body"]))[:2]


def test_json(run: Run, client: redis.Redis, tmp_path: Path) -> None:
    """Arguments are those of the row, not of the types that Spark finds in all of them."""
    path, rejects = tmp_path / "rows.jsonl", tmp_path / "rejects"
    path.write_text(LINES)
    result = run("schedule", path, "--rejects", str(rejects))
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["queue", "scheduled"],
        ["celery", "1"],
        ["far", "1"],
        [],
        f"2 scheduled, 0 already there or dealt with, 1 refused: see {rejects}".split(),
    ]
    assert body(client, "7") == [[1, {"x": None}], {"a": 1}]
    assert body(client, "b", "far") == [[], {"b": [2]}]
    [file] = rejects.iterdir()
    assert json.loads(file.read_text())["reason"] == "kwargs takes a JSON object, not '1'"

    result = run("schedule", path)
    assert result.exit_code == 1
    [told, error] = result.stderr.strip().splitlines()[-2:]
    assert "To go on, run it again with --job-id" in told
    assert error.startswith("Error: 1 rows are refused, and max_rejects is 0: kwargs takes a JSON")


def test_csv(run: Run, client: redis.Redis, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text(CSV)
    told = (path, "--format", "csv", "--key-columns", "user", "--queue", "q", "--json")
    for count in ((2, 0), (0, 2)):
        report = json.loads(run("schedule", *told, "--job-id", "j").stdout)
        assert (report["accepted"], report["already"]) == count
    ids = sorted(check_backlog(client, "q"))
    assert sorted(body(client, id, "q") for id in ids) == [[[], {}], [[1, "x"], {}]]
    path.write_text("user\n007\n")
    assert json.loads(run("cancel", *told).stdout)["accepted"] == 1
    assert len(check_backlog(client, "q")) == 1


def test_parquet(
    spark: SparkSession, run: Run, client: redis.Redis, store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    rows = spark.range(10, numPartitions=1).select(F.col("id").cast("string"))
    tasks = rows.withColumns({"task": F.lit("t"), "eta": F.lit("2100-01-01").cast("timestamp")})
    tasks.write.parquet(str(path))
    assert json.loads(run("schedule", path, "--json").stdout)["queues"] == {"celery": 10}

    moves = tmp_path / "moves.parquet"
    rows.withColumn("countdown", F.lit(0)).where("id < 5").write.parquet(str(moves))
    result = run("reschedule", moves, "--queue", "celery")
    assert result.stdout.splitlines()[-1] == "5 rescheduled, 0 already there or dealt with"
    assert (store.size("celery").ready, store.size("celery").delayed) == (5, 5)


def test_files_that_are_no_rows(run: Run, spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"id": "a", "task": "t", "eta": "2100"}\nno json\n')
    result = run("schedule", path)
    assert (result.exit_code, "alformed" in result.output) == (1, True), result.output
    path.write_text('{"id": "a", "tsk": "t", "eta": "2100"}\n')
    result = run("schedule", path)
    assert "Error: schedule knows no column 'tsk'; did you mean 'task'?" in result.output
    assert "--job-id" not in result.output
    assert "PATH_NOT_FOUND" in run("cancel", tmp_path / "none.csv").output


@pytest.mark.parametrize(
    ("path", "format"),
    [
        ("a.parquet", "parquet"),
        ("s3a://b/c.JSONL".lower(), "json"),
        ("a.json.gz", "json"),
        ("x.2026.csv", "csv"),
        ("a/*.csv", "csv"),
        ("a.csv/b", None),
        ("a", None),
    ],
)
def test_formats(path: str, format: str | None) -> None:
    if format:
        assert format_of(path) == format
    else:
        with pytest.raises(OptionError, match="name the format, parquet or json or csv"):
            format_of(path)


class Info(NamedTuple):
    numCompletedTasks: int
    numTasks: int


class Tracker:
    """Says what a look after the other is to see."""

    def __init__(self, *looks: dict[int, Info | None]) -> None:
        self._looks = iter(looks)
        self._now: dict[int, Info | None] = {}

    def getActiveStageIds(self) -> list[int]:
        self._now = next(self._looks)
        return list(self._now)

    def getStageInfo(self, id: int) -> Info | None:
        return self._now[id]


def test_how_far_stages_are() -> None:
    tracker = Tracker(
        {},
        {1: Info(1, 4), 2: None},
        {1: Info(3, 4), 2: Info(0, 2)},
        {2: Info(1, 2)},
        {},
    )
    stages = Stages(tracker)  # type: ignore[arg-type]
    assert [stages.look() for _ in range(5)] == [(0, 0), (1, 4), (3, 6), (5, 6), (6, 6)]
