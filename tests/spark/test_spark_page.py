"""The job `report`: tables, and a self-contained page."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from celery_ext.spark.events.batches import SCHEMA
from celery_ext.spark.reports import failures, queries
from celery_ext.spark.reports.page import ReportError, _page_file, report
from kombu_delayed.store.outcomes.records import Kept, Note, Outcomes
from kombu_delayed.store.store import Store

pytestmark = pytest.mark.thorough

START = datetime(2026, 11, 21, tzinfo=timezone.utc)

HOSTILE = "<script>alert('$x$')</script>"


def life(number: int, dice: random.Random) -> Iterator[tuple[Any, ...]]:
    """Most messages are a little late; some are late by much, redelivered, dead or forgotten."""
    due = START + timedelta(seconds=number * 120 + 60)
    late = min(dice.lognormvariate(-2, 1.5), 100)
    worker = f"w{dice.choice([1, 1, 2, 3])}@{HOSTILE if number % 3 else 'shop'}"
    task = dice.choice(["shop.charge", "shop.send_mail", HOSTILE])
    queue, tenant = ("bulk", "acme") if number % 5 == 0 else ("celery", "")
    moves = [(-90.0, "scheduled", "", 0)]
    if number % 50:
        moves.append((late, "delivered", worker, 0))
        if number % 20 == 0:
            moves += [(late + 30, "reclaimed", worker, 1), (late + 31, "delivered", "w9@shop", 1)]
            moves.append((late + 33, "buried" if number % 40 == 0 else "acked", "w9@shop", 1))
        else:
            moves.append((late + 2, "acked", worker, 0))
    for offset, event, name, deliveries in moves:
        at = due + timedelta(seconds=offset)
        stream_id = f"{int(at.timestamp() * 1000)}-{number}"
        consumer = name and f"{name}:1:aa"
        yield (
            *(stream_id, event, f"id-{number}", task, tenant, queue, due, at),
            *(consumer, name, deliveries, "", ""),
        )


@pytest.fixture(scope="module")
def events(spark: SparkSession) -> DataFrame:
    dice = random.Random(3)
    rows = [event for number in range(1, 601) for event in life(number, dice)]
    return spark.createDataFrame(rows, SCHEMA)


@pytest.fixture(scope="module")
def out(events: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report")
    told: list[str] = []
    failed = events.sparkSession.createDataFrame(
        [
            ("celery", f"id-{n}", HOSTILE, "", "ValueError", f"no card {n}", 0, "w1@shop", START)
            for n in range(3)
        ],
        failures.SCHEMA,
    )
    given = {"title": HOSTILE, "progress": told.append, "failures": failed}
    made = report(events, str(path), 10, **given)
    assert made == f"{path}/report.html"
    assert sorted(told) == sorted(each.name for each in path.iterdir() if each.is_dir())
    return path


@pytest.fixture(scope="module")
def text(out: Path) -> str:
    return (out / "report.html").read_text("utf-8")


def test_it_needs_nothing_else(text: str) -> None:
    assert not re.search(r'(src|href)="(?!#)|url\((?!#)|@import', text)
    assert not re.search(r"<(script|link|img|iframe|object)\b", text)
    assert text.count("<svg") == 4


def test_names_are_text(text: str) -> None:
    assert HOSTILE not in text
    assert text.count("&lt;script&gt;alert(") > 20
    assert "alert('$x$')&lt;/script&gt;" in text  # in a plot, where `$` begins a formula


def test_what_a_person_reads(text: str, out: Path, spark: SparkSession) -> None:
    cells = [each for each in map(str.strip, re.split(r"<[^>]*>", text)) if each]
    total = spark.read.parquet(f"{out}/total").first()
    assert total is not None
    assert (total.waiting, total.messages, total.late) == (11, 588, 3)
    shown = {name: cells[cells.index(name) - 1] for name in ("deliveries", "redelivered", "dead")}
    assert shown == {"deliveries": "612", "redelivered": "3.92 %", "dead": "2.04 %"}
    assert cells[cells.index("later than the target") - 1] == "0.51 %"
    assert "The worst 100" in cells
    assert "11 were due by the last event and had not been delivered." in cells
    assert {"bulk", "celery", "acme", "w9@shop"} <= set(cells)


def test_the_tables(out: Path, spark: SparkSession) -> None:
    worst = spark.read.parquet(f"{out}/worst").select("lateness_seconds").collect()
    assert len(worst) == 100
    assert worst == sorted(worst, reverse=True)
    queues = spark.read.parquet(f"{out}/queues")
    columns = ("queue", "messages", "redelivered", "dead", "workers")
    assert sorted(map(tuple, queues.select(*columns).collect())) == [
        ("bulk", 108, 24, 12, 7),
        ("celery", 480, 0, 0, 6),
    ]
    hours = spark.read.parquet(f"{out}/lateness_by_hour")
    assert hours.count() == 20


def test_tables_elsewhere(events: DataFrame) -> None:
    with pytest.raises(ReportError, match="is not a directory of this machine: choose a file"):
        report(events, "s3a://bucket/report")


def test_where_the_page_is(tmp_path: Path) -> None:
    for out, page, where in (
        (f"{tmp_path}/r", None, "r/report.html"),
        (f"file:{tmp_path}/s", None, "s/report.html"),
        ("s3a://bucket/report", f"{tmp_path}/new/page.html", "new/page.html"),
    ):
        path = _page_file(out, page)
        assert path == tmp_path / where
        assert path.parent.is_dir()


def test_a_page_that_cannot_be_written(events: DataFrame, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out, page, reason in (
        (f"{tmp_path}/r[1]", None, "with which Spark would read it as a pattern"),
        (f"{tmp_path}/r", f"{tmp_path}/file/r.html", "file/r.html: (File exists|Not a directory)"),
        (f"{tmp_path}/r", f"{tmp_path}", "it is a directory, or protected"),
    ):
        with pytest.raises(ReportError, match=reason):
            report(events, out, page_path=page)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_nothing_to_report_on(events: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no delivery among these events"):
        report(events.where("event = 'scheduled'"), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def table_under(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading."""
    part = text.split(f"<h2>{heading}</h2>")[1].split("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", part, re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]


def test_failures_and_run_times(text: str) -> None:
    _, failed = table_under(text, "Failures")
    assert failed[1:4] == ["celery", "ValueError", "3"]
    names, *ran = table_under(text, "Run times")
    assert names == ["task", "queue", "runs", "p50", "p95", "p99", "longest"]
    assert sum(int(each[2]) for each in ran) == 588 - 12  # except dead letters
    assert {each[3] for each in ran} == {"2s"}
    assert "<p>None.</p>" in text.split("<h2>Bulk jobs</h2>")[1].split("<h2>")[0]


def test_a_short_time_is_a_curve(spark: SparkSession, tmp_path: Path) -> None:
    """Twelve seconds; a job of 60 messages, and workers without a name."""
    rows = []
    for n in range(60):
        due = START + timedelta(seconds=n / 5)
        told = (f"id{n}", "t", "", "q", due)
        rows.append((f"0-{n}", "scheduled", *told, START - timedelta(hours=1), "", "", 0, "", "j"))
        late = due + timedelta(seconds=0.1 + n / 100)
        for event, at in (("delivered", late), ("acked", late + timedelta(seconds=0.5))):
            rows.append((f"1-{n}", event, *told, at, "host:1:aa", "host", 0, "", ""))
    made = report(spark.createDataFrame(rows, SCHEMA), str(tmp_path))
    late = spark.read.parquet(f"{tmp_path}/lateness_over_time").orderBy("part")
    assert [row.messages for row in late.collect()] == [5] * 12
    load = spark.read.parquet(f"{tmp_path}/deliveries_over_time")
    assert load.count() == 13
    text = Path(made).read_text("utf-8")
    assert "In parts of 1s." in text
    assert table_under(text, "Bulk jobs")[1][:4] == ["j", "q", "60", "0"]
    assert "host: workers without a name, of which all on one host count as one." in text
    assert "Not read: with the broker" in text


@pytest.mark.parametrize(
    ("seconds", "length"), [(0, 1), (150, 1), (151, 5), (86_400, 900), (30 * 86_400, 21_600)]
)
def test_how_long_parts_are(seconds: float, length: int) -> None:
    assert queries.part_seconds(seconds) == length
    assert queries.part_seconds(10**10) == 86_400


def test_light_and_dark(text: str) -> None:
    """Plots have the colour of the text around them."""
    assert "prefers-color-scheme: dark" in text
    plots = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert plots.count("currentColor") > 100
    assert not re.findall(r"#ffffff|#000000|#123456", plots)


def test_failures_that_workers_recorded(spark: SparkSession, url: str, store: Store) -> None:
    now_ms = int(START.timestamp() * 1000)
    for number, error in enumerate(("ValueError", "ValueError", "KeyError")):
        at_ms = now_ms + number
        facts = json.dumps({"error": error, "message": f"no card {number}", "run_ms": 5})
        lines = f'["s",{at_ms},1,"w1@shop:7:aa",7,0]\n["-",{at_ms},1,{facts}]\n'
        note = Note(f"id{number}", "-", at_ms, False, '["t","charge","acme"]\n', lines)
        for call in Outcomes(store).note_calls("celery", [note], Kept(100, 10**9)):
            store.all_of([call])
    found = failures.failures(spark, broker=url).orderBy("id")
    row = found.first()
    assert row is not None
    assert (row.queue, row.id, row.task, row.tenant) == ("celery", "id0", "charge", "acme")
    assert (row.error, row.message, row.at.timestamp()) == (
        "ValueError",
        "no card 0",
        START.timestamp(),
    )
    by_error = failures.by_error(found).orderBy("error").collect()
    assert [(each.error, each.failures, each.message) for each in by_error] == [
        ("KeyError", 1, "no card 2"),
        ("ValueError", 2, "no card 1"),
    ]
