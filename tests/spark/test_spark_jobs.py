"""`python -m celery_ext.spark <job>`."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from rich.console import Console

from celery_ext.spark.__main__ import main
from celery_ext.spark.commands.forecast import table_of
from celery_ext.spark.commands.group import meaning
from celery_ext.spark.events.batches import SCHEMA
from celery_ext.spark.reports import page
from kombu_delayed.store.store import Entry, Store
from tests.kit.servers import Server
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough

Run = Callable[..., Result]

ROOT = Path(__file__).parents[2]
START = datetime(2026, 11, 21, 9, tzinfo=timezone.utc)


@pytest.fixture
def run() -> Run:
    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(main, arguments, catch_exceptions=False)

    return invoke


def message(id: str) -> str:
    return json.dumps({"headers": {"id": id, "task": "mail"}, "properties": {}, "body": ""})


def server_ms(store: Store) -> int:
    seconds, microseconds = store.client.time()  # type: ignore[misc]
    return int(seconds) * 1000 + int(microseconds) // 1000


@pytest.fixture
def url(server: Server, store: Store) -> str:
    """A broker where four messages were delivered, and three wait for the next hours."""
    store.event_limit = 100
    now = int(time.time() * 1000)
    store.schedule("q", [Entry(f"done{n}", 0, message(f"done{n}"), "+1000") for n in range(4)])
    store.now = "+2000"
    delivered = store.deliver("q", "w1@shop:1:aa", 4, 1, lease_ms=30_000)
    assert delivered is not None
    last_ms = delivered.now_ms - 2000
    wait_until(lambda: server_ms(store) > last_ms, "the tasks have run for a millisecond")
    store.ack("q", "w1@shop:1:aa", [1, 2, 3], lambda: pytest.fail("an ack has failed"))
    dues = [now + hours * 3_600_000 for hours in (1, 1, 2)]
    entries = [Entry(f"w{n}", 0, message(f"w{n}"), str(due)) for n, due in enumerate(dues)]
    store.schedule("q", entries)
    return f"delayed+{server.url}"


@pytest.fixture
def archive(spark: SparkSession, run: Run, url: str, tmp_path: Path) -> str:
    path = str(tmp_path / "archive")
    result = run("archive", "-b", url, "--path", path)
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


def test_a_report(run: Run, archive: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def report(events: DataFrame, out: str, target: float, **options: Any) -> str:
        options.pop("progress")("total")
        return f"{events.count()} {out} {target} {options['title']} {options['page_path']}"

    monkeypatch.setattr(page, "report", report)
    told = ("report", "--archive", archive, "--out", "here", "--target-seconds", "5")
    assert run(*told, "--title", "Shop").stdout == "14 here 5.0 Shop None\n"
    assert run(*told, "--since", "2100-01-01").stdout == "0 here 5.0 Delayed tasks None\n"
    until = ("--until", "2100-01-01", "--page", "a.html")
    assert run(*told, *until).stdout == "14 here 5.0 Delayed tasks a.html\n"


CASES: list[tuple[str, tuple[str, ...], int, str]] = [
    ("no broker", ("archive", "--path", "{}"), 1, "Error: give the broker by one of the options"),
    (
        "a wrong option",
        ("archive", "-b", "{url}", "--path", "{}", "--starting-offsets", "now"),
        1,
        "Error: option starting_offsets takes earliest or latest, not 'now'",
    ),
    (
        "no server",
        ("archive", "-b", "delayed+redis://127.0.0.1:1/0", "--path", "{}"),
        1,
        "Error: Error 111 connecting to 127.0.0.1:1",
    ),
    ("no archive", ("report", "--archive", "{}", "--out", "{}"), 1, "write one with the job arch"),
    ("a wrong job", ("reports",), 2, "Did you mean"),
    (
        "a wrong setting",
        ("--conf", "x", "compact", "--archive", "a", "--path", "b"),
        2,
        "NAME=VALU",
    ),
    (
        "a wrong target",
        ("report", "--archive", "{}", "--out", "{}", "--target-seconds", "0"),
        2,
        "--target-seconds",
    ),
]


@pytest.mark.parametrize(("name", "arguments", "code", "text"), CASES, ids=[c[0] for c in CASES])
def test_errors(
    name: str,
    arguments: tuple[str, ...],
    code: int,
    text: str,
    run: Run,
    spark: SparkSession,
    server: Server,
    tmp_path: Path,
) -> None:
    filled = [each.format(tmp_path, url=f"delayed+{server.url}") for each in arguments]
    result = run(*filled)
    assert (result.exit_code, text in result.output) == (code, True), result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[STREAM_FAILED] Query …\nTraceback (most recent call last):\n  File …\n"
            "celery_ext.spark.events.positions.EventsLost: 5 were trimmed\n\nJVM stacktrace:\nx",
            "5 were trimmed",
        ),
        (
            "[PATH_NOT_FOUND] Path does not exist\n\nJVM stacktrace:\norg…",
            "[PATH_NOT_FOUND] Path does not exist",
        ),
    ],
)
def test_what_an_error_means(text: str, expected: str) -> None:
    assert meaning(PySparkException(text)) == expected


@pytest.mark.parametrize("name", ["pyspark", "rich"])
def test_what_has_to_be_installed(name: str) -> None:
    program = f"import runpy, sys; sys.modules[{name!r}] = None; runpy.run_module"
    program += "('celery_ext.spark', run_name='__main__')"
    command = [sys.executable, "-c", program, "archive"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    told = f"these jobs need {name}: pip install 'kombu-delayed[spark,cli]'\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_jobs_have_help(run: Run) -> None:
    result: Any = run("--help")
    assert all(job in result.output for job in ("archive", "compact", "report", "forecast"))


def test_the_guide(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """The examples of the page, run."""
    text = (ROOT / "docs" / "guides" / "spark-jobs.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = {}
    for block in blocks:
        there = block.replace("delayed+redis://localhost:6379/0", url)
        exec(there.replace("/data/", f"{tmp_path}/"), found)
    assert found["count"] == 14
    assert found["stream"].columns == SCHEMA.names
