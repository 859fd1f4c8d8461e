"""The job `simulate`: windows in Spark, and the command."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from celery_ext.spark.simulation import load
from celery_ext.spark.simulation import run as job
from celery_ext.spark.simulation.load import slices_of, waits, windows_of
from celery_ext.spark.simulation.model import Fleet
from kombu_delayed.store.store import Entry, Store
from tests.kit.spark import Run
from tests.kit.state import message

pytestmark = pytest.mark.thorough

START = datetime(2026, 11, 21, tzinfo=timezone.utc)


def test_the_same_however_spark_cuts_it(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "LEAST_IN_WINDOW", 500)
    fleet = Fleet(workers=4, slots=2, run_seconds=0.3, crashes_per_day=500, acks_late=True)
    slices = slices_of([(10.0 * n, 10.0 * n + 10, 180) for n in range(60)])
    windows = windows_of(slices, waits(slices, fleet), fleet)
    many = job.gathered(job.simulated(spark, windows, fleet))
    one = job.gathered(job.simulated(spark, windows[::-1], fleet).coalesce(1))
    assert len(windows) > 5
    assert many == one
    assert sum(many[1][0].values()) == many[0][0].messages == 60 * 180
    assert many[0][0].redelivered > 0


def test_times_of_a_frame(spark: SparkSession) -> None:
    seconds = [0.25, 0.75, 3.5, 3.5, 3.5, 86_400, None]
    data = [(s if s is None else START + timedelta(seconds=s),) for s in seconds]
    frame = spark.createDataFrame(data, "due timestamp")
    day = 86_400.0
    assert job.counts_of(frame, START) == [(0.25, 0.75, 2), (3.5, 3.5, 3), (day, day, 1)]
    assert job.counts_of(frame)[1] == (3.25, 3.25, 3)
    late = START + timedelta(seconds=3)
    assert job.counts_of(frame, late)[:2] == [(0, 0, 2), (0.5, 0.5, 3)]
    assert job.counts_of(frame.limit(0)) == []
    with pytest.raises(job.NothingToSimulate, match="nothing falls due"):
        job.simulate(spark, Fleet(), frame.limit(0))


def test_a_frame_with_too_much_work(spark: SparkSession, tmp_path: Path) -> None:
    """A thousand tasks at one instant, ten at a time, a second each."""
    frame = spark.range(1000).selectExpr("timestamp_seconds(1e9) due")
    fleet = Fleet(workers=2, slots=5, run_spread="constant", run_seconds=1.0)
    found = job.simulate(spark, fleet, frame)
    figures = found.result
    assert (figures.messages, figures.simulated, figures.p50_error) == (1000, 1000, None)
    assert figures.p50_seconds == pytest.approx(50, rel=0.03)
    assert figures.max_seconds == pytest.approx(99 * 1.0006 + 0.0021)
    assert figures.utilisation == pytest.approx(1, rel=0.01)
    assert figures.ends_seconds == pytest.approx(100, rel=0.01)
    assert figures.most_messages == pytest.approx(1000, abs=2)
    found.write(str(tmp_path))
    (row,) = spark.read.parquet(f"{tmp_path}/result").collect()
    assert row.asDict() == asdict(figures)
    assert spark.read.parquet(f"{tmp_path}/course").count() == len(found.course)
    assert spark.read.parquet(f"{tmp_path}/windows").columns[:3] == [
        "number",
        "group",
        "wait_seconds",
    ]


def test_the_command(run: Run, tmp_path: Path) -> None:
    told = ("simulate", "--workers", "3", "--slots", "2", "--run-seconds", "0.5", "--messages")
    plot = tmp_path / "plot.svg"
    more = ("--hours", "0.1", "--acks-late", "--plot", str(plot), "--out", str(tmp_path / "out"))
    figures = json.loads(run(*told, "3000", *more, "--json").stdout)
    assert figures["slots"] == 6
    assert figures["messages"] == figures["simulated"] == pytest.approx(3000, rel=0.1)
    assert plot.read_text().count("<svg") == 1
    assert (tmp_path / "out" / "result").is_dir()


def test_the_backlog_of_a_broker(run: Run, url: str, store: Store) -> None:
    text, due = message("a", headers={"id": "a"}), int(time.time() * 1000) + 60_000
    store.schedule("q", [Entry(f"id{n}", 0, text, str(due)) for n in range(4)])
    result = run("simulate", "-b", url, "--run-spread", "constant", "--json")
    figures = json.loads(result.stdout)
    assert figures["messages"] == 4
    assert figures["max_seconds"] == pytest.approx(3.004, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "one of --messages, --due and the broker's"),
        (("--messages", "5", "--due", "here"), 2, "one of --messages, --due and the broker's"),
        (("--due", "here", "--hours", "3"), 2, "only apply to --messages"),
        (("--messages", "5", "--workers", "0"), 1, "Error: workers is a whole number from 1 to"),
        (("--messages", "5", "--run-spread", "lognormal"), 1, "Error: run_spread lognormal needs"),
        (("--messages", "5", "--plot", "x.doc"), 1, "Error: a picture is .svg, .png or .pdf, not"),
        (("--messages", "5", "--plot", "none/x.svg"), 1, "Error: none/x.svg cannot be written"),
    ],
)
def test_errors(arguments: tuple[str, ...], code: int, text: str, run: Run) -> None:
    result = run("simulate", *arguments)
    assert (result.exit_code, text in result.output) == (code, True), result.output
