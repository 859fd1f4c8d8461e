"""Jobs that can be found again, finished and forgotten."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import redis
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from celery_ext.spark import forget_job, job_report, jobs, schedule
from celery_ext.spark.options import WriteOptions
from celery_ext.spark.sink import registry
from celery_ext.spark.sink.registry import (
    JobReport,
    JobRuns,
    JobState,
    Progress,
    keep_report,
    may_be_done,
)
from celery_ext.spark.sink.write import BacklogWriter, RowsLost
from kombu_delayed.errors import OptionError, ServerFull
from kombu_delayed.store.ledgers import CANCEL, Job, LedgerStore
from kombu_delayed.store.store import Store
from tests.kit.backlog import check_backlog
from tests.kit.claims import full
from tests.kit.servers import available_kinds, start_server
from tests.kit.spark import Run, numbered
from tests.kit.state import all_keys, entry
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough

JOB = Job("j", "run", 100)
COUNT = 2000


def only(url: str) -> JobState:
    [found] = jobs(broker=url)
    return found


@pytest.mark.parametrize(
    ("operation", "rows"),
    [
        ("schedule", {"id": ["a", "b"], "task": ["t", "t"], "countdown": [1e9, 1e9]}),
        ("reschedule", {"id": ["a", "b"], "countdown": [1e9, 1e9]}),
    ],
)
def test_rows_that_the_server_has_lost_fail_a_job(
    operation: str, rows: dict[str, Any], store: Store, url: str, client: redis.Redis
) -> None:
    store.schedule("celery", [entry(id, 4_000_000_000_000) for id in "ab"])
    if operation == "schedule":
        client.flushall()
    batch = pyarrow.RecordBatch.from_pydict(rows)
    schema = StructType()
    for name in rows:
        schema.add(name, "double" if name == "countdown" else "string")
    options = {"broker": url, "job_id": "j", "operation": operation, "queue": "celery"}
    writer = BacklogWriter(WriteOptions.parse(options), schema)
    writer.begin()
    written = writer.write(iter([batch]))
    client.flushall()
    with pytest.raises(RowsLost, match=r"lost 2 of the 2 rows that job j wrote: .* Run the job"):
        writer.commit([written])
    writer.abort([written])
    assert (only(url).state, only(url).operation) == ("failed", operation)


def test_lost_rows_are_seen_although_an_attempt_failed(url: str, client: redis.Redis) -> None:
    """Both the rows that the attempt had made and those that its successor has found there."""
    schema = StructType().add("id", "string").add("task", "string").add("countdown", "double")
    given = {"broker": url, "job_id": "j", "queue": "celery", "batch_size": 1}
    options = WriteOptions.parse(given)

    def batches(*ids: str) -> Iterator[pyarrow.RecordBatch]:
        for id in ids:
            rows = {"id": [id], "task": ["t"], "countdown": [1e9]}
            yield pyarrow.RecordBatch.from_pydict(rows)

    def fails() -> Iterator[pyarrow.RecordBatch]:
        yield from batches("a", "b", "c")
        raise OSError("the executor is gone")

    def lose_what_came_after(snapshot: dict[bytes, Any]) -> None:
        client.flushall()
        for key, value in snapshot.items():
            client.restore(key, 0, value)

    writer = BacklogWriter(options, schema)
    writer.begin()
    begun = {key: client.dump(key) for key in client.scan_iter()}
    with pytest.raises(OSError, match="executor"):
        writer.write(fails())
    failed = {key: client.dump(key) for key in client.scan_iter()}
    for snapshot, ids in ((failed, "abcde"), (begun, "abc")):
        written = writer.write(batches(*ids))
        lose_what_came_after(snapshot)
        with pytest.raises(RowsLost, match=f"may have lost {len(ids)} of the {len(ids)} rows"):
            writer.commit([written])
    writer.commit([writer.write(batches(*"abcde"))])
    assert (only(url).accepted, only(url).already) == (5, 0)


@pytest.mark.parametrize("rate", [0, 1000])
def test_a_full_server_is_emptied_by_a_job(
    rate: int, store: Store, url: str, client: redis.Redis
) -> None:
    store.schedule("celery", [entry(id, 4_000_000_000_000) for id in "ab"])
    options = {"broker": url, "job_id": "j", "operation": "cancel", "queue": "celery"}
    given = WriteOptions.parse({**options, "max_rows_per_second": rate})
    writer = BacklogWriter(given, StructType().add("id", "string"))
    with full(client):
        writer.begin()
        written = writer.write(iter([pyarrow.RecordBatch.from_pydict({"id": ["a", "b", "c"]})]))
        writer.commit([written])
    assert job_report("j", broker=url) == JobReport("j", 2, 1, queues={"celery": 2})
    assert store.size("celery").delayed == 0


def test_a_job_that_a_full_server_refuses_does_not_run(
    store: Store, url: str, client: redis.Redis
) -> None:
    registry.begin(store, JOB, "")
    with full(client), pytest.raises(ServerFull):
        registry.begin(store, JOB, "")
    assert only(url).state == "failed"


def test_the_way_of_a_job(store: Store, url: str, client: redis.Redis) -> None:
    registry.begin(store, JOB, "s3a://lake/reminders", 44)
    begun = only(url)
    assert (begun.total_rows, begun.percent) == (44, 0)
    assert (begun.job_id, begun.state, begun.rows, begun.accepted) == ("j", "running", 0, None)
    assert (begun.operation, begun.label) == ("schedule", "s3a://lake/reminders")
    at = [0.0]
    progress = Progress(store, JOB, lambda: at[0])
    progress.add(5)
    assert only(url).rows == 0
    at[0] = 1.0
    progress.add(2)
    progress.add(4)
    assert only(url).rows == 7
    progress.report()
    assert (only(url).rows, only(url).percent) == (11, 25)
    client.pexpire("kombu-delayed-job:j:state", 100_000 - 61_000)
    assert only(url).state == "silent"
    registry.end(store, JOB, JobReport("j", 8, 2, 1))
    ended = only(url)
    assert (ended.state, ended.accepted, ended.already, ended.refused) == ("ended", 8, 2, 1)

    registry.begin(store, Job("j", "run", 100, "reschedule"), "")
    registry.end(store, Job("j", "run", 100, "reschedule"), None)
    registry.begin(store, JOB, "again")
    again, moved = sorted(jobs(broker=url), key=lambda job: job.operation, reverse=True)
    assert (again.label, again.rows, again.accepted) == ("again", 0, None)
    assert (again.total_rows, again.percent) == (None, None)
    assert (moved.operation, moved.state) == ("reschedule", "failed")
    client.delete("kombu-delayed-job:j:state")
    assert only(url) == moved
    assert client.ttl("kombu-delayed-job:j:reschedule:state") > 0


def test_two_runs_of_a_job(store: Store, url: str) -> None:
    """The outcome of one run does not affect the other."""
    first, second = Job("j", "first", 100), Job("j", "second", 100)
    registry.begin(store, first, "")
    late = Progress(store, second)
    for report, found in ((None, "failed"), (JobReport("j", 5), "ended")):
        registry.begin(store, second, "")
        registry.end(store, second, report)
        late.add(1)
        late.report()  # by a task that was too late
        assert only(url).state == found
        progress = Progress(store, first)
        progress.add(1)
        progress.report()
        assert (only(url).state, only(url).accepted) == ("running", None)
        with pytest.raises(JobRuns):
            forget_job("j", broker=url)
    registry.end(store, first, JobReport("j", 7))
    assert (only(url).state, only(url).accepted) == ("ended", 7)
    registry.end(store, Job("j", "", 100), None)  # for either run
    progress.add(1)
    progress.report()
    assert only(url).state == "failed"


def test_a_job_is_listed_that_ends_after_the_server_lost_its_data(
    store: Store, url: str, client: redis.Redis
) -> None:
    for report, state in ((None, "failed"), (JobReport("j", 5), "ended")):
        registry.begin(store, JOB, "")
        client.flushall()
        registry.end(store, JOB, report)
        assert only(url).state == state


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (AnalysisException("Failed to commit or abort Python data source write: x"), True),
        (AnalysisException("Failed to initialize Python data source writer: x"), False),
        (AnalysisException("[UNRESOLVED_COLUMN] x"), False),
        (OptionError("x"), False),
        (PythonException("x"), True),
        (KeyboardInterrupt(), True),
    ],
    ids=lambda value: f"{value!r}",
)
def test_after_which_errors_rows_may_be_there(error: BaseException, expected: bool) -> None:
    """Spark turns errors of a data source into analysis errors, at a write's begin and its end."""
    assert may_be_done(error) is expected


def test_only_the_last_jobs_are_kept(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "JOBS", 3)
    for n in range(5):
        registry.begin(store, Job(f"{n}", "run", 100), "")
    assert {job.job_id for job in jobs(broker=url)} == {"2", "3", "4"}


def test_forget(store: Store, url: str, client: redis.Redis) -> None:
    store.now = "1000"
    registry.begin(store, JOB, "")
    # More rows than one hash has room for, in two queues; and another job.
    for queue, job in (("q", JOB), ("r", JOB), ("q", Job("other", "run", 100))):
        LedgerStore(store, job).schedule(queue, [entry(f"{n}", 2000) for n in range(600)])
        LedgerStore(store, job).schedule(queue, [entry(f"m{n}", 2000) for n in range(90)])
    keep_report(store, JOB, JobReport("j"))
    assert len([key for key in all_keys(client) if "job-slice:" in key]) > 200
    store.now = ""
    registry.begin(store, JOB, "")
    with pytest.raises(JobRuns, match="job 'j' is running; its last report was at"):
        forget_job("j", broker=url)
    registry.end(store, JOB, JobReport("j"))
    client.config_resetstat()
    forget_job("j", broker=url)
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] >= 2 * 4096 // 64
    assert jobs(broker=url) == []
    assert job_report("j", broker=url) is None
    left = [key for key in all_keys(client) if "job" in key]
    assert left
    assert all(key.endswith(":other") for key in left)
    assert {str(key)[-7:-1] for key in client.zrange("{q}:ledgers-until", 0, -1)} == {":other"}
    assert not client.exists("{r}:ledgers-until")
    assert len(check_backlog(client, "q")) == 690


def test_forget_a_job_without_a_ledger(store: Store, url: str) -> None:
    """One that cancels: something was kept of it, so this is what the command says."""
    job = Job("j", "run", 100, CANCEL)
    registry.begin(store, job, "")
    registry.end(store, job, JobReport("j"))
    assert (forget_job("j", broker=url), jobs(broker=url)) == (1, [])
    assert forget_job("j", broker=url) == 0


@pytest.mark.parametrize("call", [forget_job, job_report])
def test_a_key_of_a_job_is_no_job(call: Any, store: Store, url: str) -> None:
    registry.begin(store, Job("j", "run", 100, CANCEL), "")
    with pytest.raises(OptionError, match="'j:state' is not a job"):
        call("j:state", broker=url)
    assert [each.job_id for each in jobs(broker=url)] == ["j"]


def test_an_interrupt_in_a_notebook(spark: SparkSession, tmp_path: Path) -> None:
    """Notebooks replace PySpark's handler of the signal, which would cancel all jobs.

    Has its own server, because Spark may end the job when this test has ended.
    """
    context, begun = spark.sparkContext, tmp_path / "begun"

    @F.udf("string", useArrow=False)
    def never(id: str) -> None:
        begun.touch()
        time.sleep(10**6)

    def interrupt() -> None:
        try:
            wait_until(begun.exists, "a task runs", 600)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with start_server(available_kinds()[0], tmp_path, port=0) as server:
        url = f"delayed+{server.url}"
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                schedule(numbered(spark, 2, task=never("id")), broker=url)
            wait_until(lambda: not context.statusTracker().getActiveJobsIds(), "Spark's tasks end")
        finally:
            signal.signal(signal.SIGINT, before)
            context.cancelAllJobs()
            thread.join()
        assert only(url).state == "failed"


@pytest.mark.parametrize(
    ("sent", "state"), [(signal.SIGKILL, "running"), (signal.SIGINT, "failed")]
)
def test_a_driver_that_is_lost(
    sent: signal.Signals,
    state: str,
    url: str,
    client: redis.Redis,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    path = tmp_path / "rows.parquet"
    rows: dict[str, Any] = {
        "id": range(COUNT),
        "task": ["t"] * COUNT,
        "eta": ["2100-01-01"] * COUNT,
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), path)
    command = [sys.executable, "-m", "celery_ext.spark", "--master", "local[1]"]
    # So slow that it has not ended before the signal, on any machine.
    command += ["schedule", str(path), "-b", url, "--max-rows-per-second", "20"]
    others = len(client.client_list())
    driver = subprocess.Popen(
        command,
        env={**os.environ, "SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1"},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(
            lambda: check_some(client) or driver.poll() is not None, "rows are written", 1200
        )
        driver.send_signal(sent)
        driver.wait(600)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        _, told = driver.communicate()
    wait_until(lambda: len(client.client_list()) <= others, "its workers have ended", 600)
    assert "Traceback" not in told
    assert (sent == signal.SIGINT) == ("Some rows may be done. To continue, run it" in told)
    lost = only(url)
    assert f"Job {lost.job_id}\n" in told
    assert (lost.operation, lost.label, lost.state) == ("schedule", str(path), state)
    written = len(check_backlog(client, "celery"))
    assert 0 < written < COUNT

    run: Run = request.getfixturevalue("run")
    again = run("schedule", str(path), "-b", url, "--job-id", lost.job_id, "--json")
    report = json.loads(again.stdout)
    assert (report["accepted"], report["already"]) == (COUNT - written, written)
    assert len(check_backlog(client, "celery")) == COUNT
    [told] = map(json.loads, run("jobs", "-b", url, "--json").stdout.splitlines())
    assert (told["state"], told["rows"], told["accepted"]) == ("ended", COUNT, COUNT - written)
    assert told["rows_per_second"] > 0
    assert (told["total_rows"], told["percent"]) == (COUNT, 100)
    first, second = run("jobs", "-b", url).stdout.splitlines()
    assert first.startswith(f"{lost.job_id}  ended, started ")
    assert first.endswith(f": schedule {path}")
    assert second.startswith("    2,000 of 2,000 (100 %) rows, ")
    assert second.endswith(f"/s: {COUNT - written:,} accepted, {written:,} already, 0 refused")
    assert run("forget", lost.job_id, "-b", url).stdout == f"forgotten: {lost.job_id}\n"
    assert run("jobs", "-b", url, "--json").stdout == ""


def check_some(client: redis.Redis) -> list[Any]:
    return client.zrange("{celery}:partitions", 0, 0)
