"""`python -m celery_ext.spark <job>`: with archives, and with files of rows."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from py4j.protocol import Py4JJavaError, Py4JNetworkError
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from rich.console import Console

from celery_ext.spark import connect
from celery_ext.spark.commands import change as change_commands
from celery_ext.spark.commands.files import format_of
from celery_ext.spark.commands.forecast import table_of
from kombu_delayed.errors import OptionError
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.spark import Run
from tests.kit.state import message
from tests.kit.wait import wait_until
from tests.kit.workers import ROOT

pytestmark = pytest.mark.thorough

START = datetime(2026, 11, 21, 9, tzinfo=timezone.utc)


def task(id: str, due: str) -> Entry:
    return Entry(id, 0, message(id, headers={"id": id, "task": "mail"}), due)


def server_ms(store: Store) -> int:
    seconds, microseconds = store.client.time()  # type: ignore[misc]
    return int(seconds) * 1000 + int(microseconds) // 1000


@pytest.fixture
def busy_url(url: str, store: Store) -> str:
    """A broker where four messages were delivered, and three are due in the next hours."""
    store.event_limit = 100
    now = int(time.time() * 1000)
    store.schedule("q", [task(f"done{n}", "+1000") for n in range(4)])
    store.now = "+2000"
    delivered = store.deliver("q", "w1@shop:1:aa", 4, 1, lease_ms=30_000)
    assert delivered is not None
    last_ms = delivered.now_ms - 2000
    wait_until(lambda: server_ms(store) > last_ms, "the tasks have run for a millisecond")
    store.ack("q", "w1@shop:1:aa", [1, 2, 3], lambda: pytest.fail("an ack has failed"))
    dues = [now + hours * 3_600_000 for hours in (1, 1, 2)]
    store.schedule("q", [task(f"w{n}", str(due)) for n, due in enumerate(dues)])
    return url


@pytest.fixture
def archive(run: Run, busy_url: str, tmp_path: Path) -> str:
    path = str(tmp_path / "archive")
    result = run("archive", "-b", busy_url, "--path", path)
    assert result.stdout == f"14 events written to {path}\n"
    return path


def test_from_the_broker_to_a_forecast(run: Run, url: str, archive: str) -> None:
    result = run("forecast", "-b", url, "--archive", archive, "--hours", "3", "--json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["known"] for row in rows] in ([2, 1, 0], [0, 2, 1])
    assert {row["queue"] for row in rows} == {"q"}
    assert {row["workers"] for row in rows} <= {0, 1}

    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table_of([{**row, "hour": START} for row in rows], 0.9))
    head, *lines = console.export_text().splitlines()
    assert head.split() == [
        *("queue", "hour", "(UTC)", "known", "expected", "90%", "of", "the", "time", "slots")
    ]
    assert [line.split()[:3] for line in lines] == [["q", "11-21", "09:00"]] * 3


ARCHIVE, REPORT = ("archive", "--path", "{}"), ("report", "--archive", "{}", "--out", "{}")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (ARCHIVE, 1, "Error: give the broker by one of the options"),
        (
            (*ARCHIVE, "-b", "{url}", "--starting-offsets", "now"),
            1,
            "Error: option starting_offsets takes earliest or latest, not 'now'",
        ),
        (
            (*ARCHIVE, "-b", "delayed+redis://127.0.0.1:1/0"),
            1,
            "Error: Error 111 connecting to 127.0.0.1:1",
        ),
        (("jobs",), 1, "Error: give the broker by one of the options broker, broker_env and app\n"),
        (("backup", "{}/b"), 1, "by one of the options broker, broker_env and app\n"),
        (("backup", "no-fs://b", "-b", "{url}"), 1, "Error: Spark has no file system for no-fs://"),
        (("backup", "s3a://b/c", "-b", "{url}"), 1, "Error: Spark does not have the library with"),
        (("backup", "/proc/b/c", "-b", "{url}"), 1, "Spark cannot make the directory /proc/b/c\n"),
        (REPORT, 1, "write one with the job arch"),
        ((*REPORT, "--target-seconds", "0"), 2, "--target-seconds"),
        (("reports",), 2, "Did you mean"),
        (("--conf", "x", "compact", "--archive", "a", "--path", "b"), 2, "NAME=VALU"),
    ],
)
def test_errors(
    arguments: tuple[str, ...],
    code: int,
    text: str,
    run: Run,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(connect.PATIENT, "max_retries", 1)
    result = run(*(each.format(tmp_path, url=url) for each in arguments))
    assert (result.exit_code, text in result.output) == (code, True), result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", ["pyspark", "rich"])
def test_what_has_to_be_installed(name: str) -> None:
    program = f"import runpy, sys; sys.modules[{name!r}] = None; runpy.run_module"
    program += "('celery_ext.spark', run_name='__main__')"
    command = [sys.executable, "-c", program, "archive"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    told = f"these jobs need {name}: pip install 'kombu-delayed[spark,cli]'\n"
    assert (done.returncode, done.stderr) == (1, told)


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
def change(run: Run, url: str) -> Run:
    """Run one of the jobs that take a file of rows."""
    return lambda job, path, *arguments: run(job, str(path), "-b", url, *arguments)


def body(client: redis.Redis, id: str, queue: str = "celery") -> Any:
    record = client.hget(f"{{{queue}}}:messages", id)
    assert isinstance(record, bytes)
    payload = json.loads(record[record.index(b"{") :])
    return json.loads(base64.b64decode(payload["body"]))[:2]


def test_json(change: Run, client: redis.Redis, tmp_path: Path) -> None:
    """Arguments are those of the row, not of the types that Spark infers from all rows."""
    path, rejects = tmp_path / "rows.jsonl", tmp_path / "rejects"
    path.write_text(LINES)
    result = change("schedule", path, "--rejects", str(rejects))
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.stdout.splitlines()] == [
        *(["queue", "scheduled"], ["celery", "1"], ["far", "1"], []),
        f"2 scheduled, 0 already done, 1 refused: see {rejects}".split(),
    ]
    assert body(client, "7") == [[1, {"x": None}], {"a": 1}]
    assert body(client, "b", "far") == [[], {"b": [2]}]
    [file] = rejects.iterdir()
    assert json.loads(file.read_text())["reason"] == "kwargs takes a JSON object, not '1'"

    result = change("schedule", path)
    assert result.exit_code == 1
    [told, error] = result.stderr.strip().splitlines()[-2:]
    assert "To continue, run it again with --job-id" in told
    assert error.startswith("Error: 1 rows are refused, and max_rejects is 0: kwargs takes a JSON")


def test_csv(change: Run, client: redis.Redis, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text(CSV)
    told = (path, "--format", "csv", "--key-columns", "user", "--queue", "q", "--json")
    for count in ((2, 0), (0, 2)):
        report = json.loads(change("schedule", *told, "--job-id", "j").stdout)
        assert (report["accepted"], report["already"]) == count
    ids = sorted(check_backlog(client, "q"))
    assert sorted(body(client, id, "q") for id in ids) == [[[], {}], [[1, "x"], {}]]
    path.write_text("user\n007\n")
    assert json.loads(change("cancel", *told).stdout)["accepted"] == 1
    assert len(check_backlog(client, "q")) == 1


NUMBERS = """\
id,task,countdown,priority,expires
a,t,1e9,3.0,1800
b,t,1e9,high,
"""


def test_numbers_in_csv(change: Run, client: redis.Redis, tmp_path: Path) -> None:
    path, rejects = tmp_path / "rows.csv", tmp_path / "rejects"
    path.write_text(NUMBERS)
    result = change("schedule", path, "--rejects", str(rejects), "--json")
    report = json.loads(result.stdout)
    assert (report["accepted"], report["refused"]) == (1, 1)
    [file] = rejects.iterdir()
    assert json.loads(file.read_text())["reason"] == "priority takes a number, not 'high'"
    payload = json.loads(b"{" + client.hget("{celery}:messages", "a").partition(b"{")[2])  # type: ignore[union-attr]
    ahead = datetime.fromisoformat(payload["headers"]["expires"]) - datetime.now(timezone.utc)
    assert timedelta(0) < ahead <= timedelta(seconds=1800)
    assert payload["properties"]["priority"] == 3


def test_parquet(
    spark: SparkSession, change: Run, client: redis.Redis, store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    rows = spark.range(10, numPartitions=1).select(F.col("id").cast("string"))
    tasks = rows.withColumns({"task": F.lit("t"), "eta": F.lit("2100-01-01").cast("timestamp")})
    tasks.write.parquet(str(path))
    assert json.loads(change("schedule", path, "--json").stdout)["queues"] == {"celery": 10}

    moves = tmp_path / "moves.parquet"
    rows.withColumn("countdown", F.lit(0)).where("id < 5").write.parquet(str(moves))
    result = change("reschedule", moves, "--queue", "celery")
    assert result.stdout.splitlines()[-1] == "5 rescheduled, 0 already done"
    assert (store.size("celery").ready, store.size("celery").delayed) == (5, 5)


def test_files_that_are_no_rows(change: Run, spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"id": "a", "task": "t", "eta": "2100"}\nno json\n')
    result = change("schedule", path)
    assert (result.exit_code, "alformed" in result.output) == (1, True), result.output
    path.write_text('{"id": "a", "tsk": "t", "eta": "2100"}\n')
    result = change("schedule", path)
    assert (
        "Error: there is no column task, the name of the task of each row; did you mean 'tsk'?"
        in result.output
    )
    assert "--job-id" not in result.output
    result = change("schedule", path, "--sql", "SELEC id")
    assert "Error: --sql: [PARSE_SYNTAX_ERROR] Syntax error" in result.output
    result = change("schedule", path, "--select", "idd AS id")
    assert "Error: --select: [UNRESOLVED_COLUMN" in result.output
    assert "PATH_NOT_FOUND" in change("cancel", tmp_path / "none.csv").output


def test_formats() -> None:
    for path in ("s3a://b/c.jsonl", "a.json.gz"):
        assert format_of(path) == "json"
    for path in ("x.2026.csv", "a/*.csv"):
        assert format_of(path) == "csv"
    assert format_of("a.parquet") == "parquet"
    for path in ("a.csv/b", "a"):
        with pytest.raises(OptionError, match="name the format, parquet or json or csv"):
            format_of(path)


def test_an_error_of_java_s_is_one_line(run: Run, url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = run("archive", "-b", url, "--path", f"{tmp_path}/file/archive")
    assert found.exit_code == 1
    [told] = [line for line in found.output.splitlines() if line.startswith("Error: ")]
    assert str(tmp_path) in told
    assert "\tat " not in found.output


def refuse(*given: Any) -> None:
    raise ConnectionRefusedError(111, "no")


@pytest.mark.parametrize("kind", ["no answer", "refused", "an error whose text only Java knows"])
def test_java_has_ended(
    kind: str, run: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it was killed for lack of memory."""

    def read_rows(*given: Any) -> None:
        if kind == "no answer":
            raise Py4JNetworkError(kind)
        if kind == "refused":
            refuse()
        gateway = SimpleNamespace(send_command=refuse)
        raise Py4JJavaError(kind, SimpleNamespace(_target_id="o1", _gateway_client=gateway))

    monkeypatch.setattr(change_commands, "read_rows", read_rows)
    found = run("schedule", "a.json", "-b", url, "--job-id", "j")
    assert found.exit_code == 1
    assert "run it again with --job-id j" in found.stderr
    assert "Error: Spark's Java process has ended, perhaps for lack of memory (" in found.stderr
