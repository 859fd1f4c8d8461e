"""The examples of the guides, as a reader would paste them."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession

from celery_ext.spark.events.batches import SCHEMA
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.spark import run_examples
from tests.kit.state import message

pytestmark = pytest.mark.thorough


def test_rows(
    spark: SparkSession,
    url: str,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("BROKER_URL", url)
    places = {"delayed+embedded://./spark-example": url, '"./': f'"{tmp_path}/'}
    found = run_examples("spark.md", **places)
    assert "JobReport(job_id='reminders 2100', accepted=1000" in capsys.readouterr().out
    assert (found["moved"].accepted, found["gone"].accepted) == (24, 5)
    assert len(check_backlog(client, "mail")) == 995
    assert len(check_backlog(client, "stream")) == 1000
    assert len(check_backlog(client, "each")) == 1000
    assert check_backlog(client, "bookings").keys() == {"17", "18"}
    assert check_backlog(client, "sql").keys() == {"again-17", "again-18"}


def test_a_day_at_a_time(
    spark: SparkSession,
    url: str,
    client: redis.Redis,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    places = {"delayed+embedded://./spark-example": url, '"./': f'"{tmp_path}/'}
    found = run_examples("far-ahead.md", **places)
    assert "accepted=18, already=0, refused=0" in capsys.readouterr().out
    assert found["gone"].accepted == 1
    assert len(check_backlog(client, "mail")) == 17


def test_events(spark: SparkSession, url: str, store: Store, tmp_path: Path) -> None:
    store.event_limit = 100
    store.schedule("q", [Entry("a", 0, message("a", headers={"id": "a"}), "+3600000")])
    Backlog(store, "q").cancel(["a"])
    places = {"delayed+redis://localhost:6379/0": url, "/data/": f"{tmp_path}/"}
    found = run_examples("spark-jobs.md", **places)
    assert (found["count"], found["stream"].columns) == (2, SCHEMA.names)


def test_a_job_for_a_cluster(
    spark: SparkSession,
    url: str,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["job.py", url, "reminders-1"])
    run_examples("spark-clusters.md", **{"spark.range(20_000)": "spark.range(200)"})
    report, count = capsys.readouterr().out.splitlines()
    assert (report.startswith("JobReport(job_id='reminders-1', accepted=200"), count) == (
        True,
        "200",
    )
    assert len(check_backlog(client, "mail")) == 200


def test_a_simulation(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_examples("simulate.md")
    assert found["found"].result.messages == pytest.approx(100_000, rel=0.02)
    assert "begin_seconds" in capsys.readouterr().out
