"""The whole way of a large Spark job beside live tasks, with exact counts from Redis at each step:

    python -m tests.benchmarks.spark_story 200000 --master "local[2]"

Rows come from Parquet. They are scheduled, the driver is killed in the middle, the job is finished,
a tenth is cancelled, a tenth is moved; all of it is archived and reported, and the ledger expires.
Any count that is off by one ends the program with an error.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from functools import cached_property
from math import nan
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import pyarrow
import pyarrow.dataset
import pyarrow.parquet

from kombu_delayed.inspection.backlog import Backlog, scan
from kombu_delayed.store.store import Store
from tests.benchmarks.app import OPTIONS
from tests.benchmarks.report import percentile
from tests.benchmarks.rig import Rig, cpu_seconds, end, rig, store_of
from tests.benchmarks.spark import LIVE_RATE, check_parser, client_of
from tests.benchmarks.spark_by_hand import DEFAULT_BUDGET_MS
from tests.benchmarks.story_page import page
from tests.benchmarks.story_watch import Watch, kill
from tests.benchmarks.workers import send_steadily
from tests.kit.servers import free_port
from tests.kit.wait import wait_until

QUEUE, JOB = "bulk", "story"
FILES = 4
START = datetime(2100, 1, 1, tzinfo=timezone.utc)
YEARS_MS = [round(START.replace(year=year).timestamp() * 1000) for year in (2100, 2101)]
TEXT = "x" * 300
ALONE_SECONDS = 15.0
#: With short leases, workers check for old ledgers every second. Live tasks keep all their events.
LIVE_OPTIONS = json.dumps({"delayed_lease_seconds": 3, "delayed_events": 10_000_000})
#: Above this, the stream of a queue has no room for all events until the next archive run.
MOST_AT_ONCE = 1_500_000
#: Then this step only checks what the archive has.
ARCHIVED = "archive, which ran beside the steps before"
LONGEST_SECONDS = 7200
ATTEMPTS = 5
SETTLE_SECONDS = 3


class WrongCount(Exception):
    """Redis, or the archive, does not contain the expected data."""


@dataclass
class Step:
    """The figures of one part of the story."""

    name: str
    began: float
    rows: int = 0
    ended: float = 0.0
    counts: str = ""
    server_us: float = 0.0
    spark_mib: float = 0.0
    server_mib: float = 0.0

    @property
    def rate(self) -> float:
        return self.rows / (self.ended - self.began)


@dataclass
class Story:
    rig: Rig
    watch: Watch
    rows: int
    master: str
    ledger_seconds: int
    budget_ms: int
    #: The number of ledger hashes after the last job has ended.
    hashes: int = 0
    steps: list[Step] = field(default_factory=list)

    @property
    def path(self) -> str:
        return str(self.rig.directory / "rows.parquet")

    @property
    def archive(self) -> Path:
        return self.rig.directory / "archive"

    @cached_property
    def store(self) -> Store:
        return store_of(self.rig)

    @contextmanager
    def step(self, name: str, rows: int = 0) -> Iterator[Step]:
        self.watch.begin()
        before, step = cpu_seconds(self.rig.redis), Step(name, time.time(), rows)
        yield step
        step.ended = time.time()
        if step.rows:
            step.server_us = (cpu_seconds(self.rig.redis) - before) / step.rows * 1e6
        step.spark_mib, step.server_mib = self.watch.spark_mib, self.watch.server_mib
        self.steps.append(step)
        seconds = step.ended - step.began
        click.echo(f"{name}: {seconds:,.1f} s, {step.rate:,.0f} rows/s, {step.counts}", err=True)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = ["celery_ext.spark", "--master", self.master, *_CONF, *arguments]
        log = self.rig.directory / f"{arguments[0]}.log"
        with log.with_suffix(".out").open("wb") as out, log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
        self.rig.stack.callback(end, process)
        self.watch.sessions.add(process.pid)
        return process

    def run(self, *arguments: str) -> str:
        """Run a job of the command line to its end; returns what it printed."""
        process = self.start(*arguments)
        if process.wait(LONGEST_SECONDS):
            log = (self.rig.directory / f"{arguments[0]}.log").read_text()
            raise RuntimeError(f"{' '.join(arguments)} failed:\n{log[-3000:]}")
        return (self.rig.directory / f"{arguments[0]}.out").read_text()

    @property
    def writing(self) -> list[str]:
        """The options of jobs that write."""
        budget = "--latency-budget-ms", str(self.budget_ms)
        return ["-b", self.rig.url(), "--ledger-seconds", str(self.ledger_seconds), *budget]

    def job(self, *arguments: str) -> dict[str, Any]:
        """The report of a job that writes."""
        found: dict[str, Any] = json.loads(self.run(*arguments, *self.writing, "--json"))
        return found

    def expect(self, what: str, found: Any, right: Any) -> None:
        if found != right:
            raise WrongCount(f"{what}: {found}, where {right} is right")


_CONF = ("--conf", "spark.driver.memory=2g", "--conf", "spark.ui.enabled=false")


def write_rows(path: str, count: int) -> None:
    """Reminders as a table of a data lake, in several files."""
    os.makedirs(path)
    for number in range(FILES):
        ids = range(number * count // FILES, (number + 1) * count // FILES)
        table = {
            "id": [f"{n}" for n in ids],
            "n": ids,
            "task": ["work"] * len(ids),
            "kwargs": [{"number": n, "text": TEXT} for n in ids],
            "eta": [START + timedelta(seconds=n) for n in ids],
        }
        pyarrow.parquet.write_table(
            pyarrow.table(table), f"{path}/part-{number}.parquet", row_group_size=100_000
        )


def waiting(story: Story) -> tuple[int, int, int]:
    """Messages of the bulk queue in Redis: due before 2101, later, and total in the index."""
    early, in_2100, later = Backlog(story.store, QUEUE).forecast(YEARS_MS)
    story.expect("messages due before 2100", early, 0)
    return in_2100, later, story.store.size(QUEUE).delayed


def scheduled_and_killed(story: Story) -> None:
    """The driver and all its processes are killed when half of the rows are written."""
    with story.step("schedule, driver killed in the middle") as step:
        schedule = story.start(
            "schedule", story.path, "--queue", QUEUE, "--job-id", JOB, *story.writing
        )
        # About half: an exact count of a large queue takes the server longer.
        half = lambda: story.store.metrics(QUEUE).delayed >= story.rows // 2  # noqa: E731
        wait_until(half, "half of the rows are written", LONGEST_SECONDS, interval_seconds=0.5)
        kill(schedule.pid)
        schedule.wait()
        settled(story.store)
        _, _, step.rows = waiting(story)
        listed = json.loads(story.run("jobs", "-b", story.rig.url(), "--json"))
        if listed["state"] not in ("running", "silent") or not step.rows < story.rows:
            raise WrongCount(f"the job was not killed in the middle: {listed}")
        step.counts = f"{step.rows:,} waiting; listed as {listed['state']}"


def settled(store: Store) -> None:
    """Wait until executors that have lost their driver have ended, too."""
    last = -1
    while (count := store.size(QUEUE).delayed) != last:
        last = count
        time.sleep(SETTLE_SECONDS)


def finished(story: Story) -> None:
    before = story.steps[-1].rows
    with story.step("finish under the same name", story.rows) as step:
        report = story.job("schedule", story.path, "--queue", QUEUE, "--job-id", JOB)
        found = report["accepted"], report["already"], report["refused"]
        story.expect("accepted, already, refused", found, (story.rows - before, before, 0))
        story.expect("waiting", waiting(story), (story.rows, 0, story.rows))
        step.counts = f"{story.rows:,} waiting; {found[0]:,} accepted, {found[1]:,} already"


def tenth(story: Story, number: int) -> int:
    return len(range(number, story.rows, 10))


def cancelled(story: Story) -> None:
    gone = tenth(story, 0)
    with story.step("cancel a tenth", gone) as step:
        query = "SELECT id FROM rows WHERE n % 10 = 0"
        report = story.job("cancel", story.path, "--queue", QUEUE, "--sql", query)
        story.expect("cancelled", report["accepted"], gone)
        left = story.rows - gone
        story.expect("waiting", waiting(story), (left, 0, left))
        step.counts = f"{left:,} waiting"


def moved(story: Story) -> None:
    count = tenth(story, 1)
    with story.step("move a tenth by a year", count) as step:
        query = "SELECT id, eta + INTERVAL 1 YEAR AS eta FROM rows WHERE n % 10 = 1"
        report = story.job("reschedule", story.path, "--queue", QUEUE, "--sql", query)
        story.expect("moved", report["accepted"], count)
        left = story.rows - tenth(story, 0)
        story.expect("waiting", waiting(story), (left - count, count, left))
        step.counts = f"{left:,} waiting, {count:,} of them in 2101"
    story.hashes = ledgers(story)


def archived(story: Story) -> None:
    events = story.rows + tenth(story, 0) + tenth(story, 1)
    is_large = story.rows > MOST_AT_ONCE
    with story.step(ARCHIVED if is_large else "archive", 0 if is_large else events) as step:
        if not is_large:
            archive(story)
        found = pyarrow.dataset.dataset(
            [str(each) for each in story.archive.glob("batch=*/date=*/queue=bulk/*.parquet")]
        )
        column = found.to_table(columns=["event"])["event"].value_counts().to_pylist()
        counts = {each["values"]: each["counts"] for each in column}
        right = {
            "scheduled": story.rows,
            "cancelled": tenth(story, 0),
            "rescheduled": tenth(story, 1),
        }
        story.expect("archived events", counts, right)
        step.counts = ", ".join(f"{count:,} {event}" for event, count in right.items())


def archive(story: Story) -> None:
    """On a full machine Spark gives up its own processes; the next run resumes from there."""
    for attempt in range(ATTEMPTS):
        try:
            story.run("archive", "-b", story.rig.url(), "--path", str(story.archive))
        except RuntimeError:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return


@contextmanager
def archiving(story: Story) -> Iterator[None]:
    """Archive rows while they are written, if the stream has no room for all of them."""
    if story.rows <= MOST_AT_ONCE:
        yield
        return
    given = "-b", story.rig.url(), "--path", str(story.archive), "--interval", "10 seconds"
    process = story.start("archive", *given)
    yield
    time.sleep(25)  # two batches later
    kill(process.pid)
    process.wait()
    archive(story)


def reported(story: Story) -> None:
    out = str(story.rig.directory / "report")
    with story.step("report", story.rows + tenth(story, 0) + tenth(story, 1)) as step:
        page = story.run("report", "--archive", str(story.archive), "--out", out).strip()
        queues = pyarrow.dataset.dataset(f"{out}/queues").to_table().to_pylist()
        live = {row["queue"]: row["messages"] for row in queues if row["messages"]}
        story.expect("queues with deliveries", [*live], ["celery"])
        size = Path(page).stat().st_size
        step.counts = f"{live['celery']:,} live deliveries; page of {size / 1024:,.0f} kB"


def ledgers(story: Story) -> int:
    patterns = ("{bulk}:job:*", "{bulk}:job-slice:*")
    return sum(1 for pattern in patterns for _ in scan(story.store, "", pattern))


def expired(story: Story) -> None:
    with story.step("ledger expires") as step:  # it may have begun to in an earlier one
        gone = lambda: ledgers(story) == 0  # noqa: E731
        wait_until(gone, "no ledger is left", story.ledger_seconds + 900, interval_seconds=1.0)
        left = story.rows - tenth(story, 0)
        story.expect("waiting", waiting(story)[2], left)
        step.counts = f"{story.hashes:,} hashes, then none; {left:,} waiting"
        time.sleep(SETTLE_SECONDS)


def send_live(url: str) -> None:
    os.environ[OPTIONS] = LIVE_OPTIONS
    send_steadily(url, 10**9, LIVE_RATE, lambda chance, number: {"countdown": 1.0})


@contextmanager
def live_load(story: Story) -> Iterator[None]:
    """Tasks at a steady rate, and a worker that also consumes the bulk queue."""
    options = {OPTIONS: LIVE_OPTIONS}
    worker = story.rig.start_worker("-Q", f"celery,{QUEUE}", environment=options)
    worker.await_ready(120)
    url = story.rig.url()
    sender = get_context("spawn").Process(target=send_live, args=(url,), daemon=True)
    sender.start()
    try:
        yield
    finally:
        sender.kill()


@contextmanager
def cluster(story: Story) -> Iterator[None]:
    """A standalone master and two worker processes, if the story wants them."""
    if story.master != "cluster":
        yield
        return
    import pyspark

    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    deploy, port = "org.apache.spark.deploy", free_port()
    story.master = f"spark://127.0.0.1:{port}"
    ui = "--webui-port", "0"
    worker = f"{deploy}.worker.Worker", "--host", "127.0.0.1", "--cores", "1", "--memory", "1g"
    commands = [[f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port), *ui]]
    commands += [[*worker, *ui, story.master]] * 2
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_WORKER_DIR": str(story.rig.directory / "work"),
    }
    for number, command in enumerate(commands):
        log = (story.rig.directory / f"spark-{number}.log").open("wb")
        process = subprocess.Popen(
            [spark_class, *command],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        story.rig.stack.callback(kill, process.pid)
        story.watch.sessions.add(process.pid)
    time.sleep(8)
    yield


#: The steps in their order, each beside live tasks.
PARTS: tuple[Callable[[Story], None], ...] = (
    scheduled_and_killed,
    finished,
    cancelled,
    moved,
)
LAST_PARTS = archived, reported, expired


def tell(story: Story) -> list[dict[str, Any]]:
    """The figures of each step; those of live tasks are of tasks that were due in it."""
    starts, told = story.rig.starts(), []
    for step in story.steps:
        late = [(s.at - s.due) * 1000 for s in starts if step.began < s.due < step.ended]
        stalls = story.watch.stalls_ms(step.began, step.ended)
        told.append(
            {
                **vars(step),
                "seconds": step.ended - step.began,
                "rate": step.rate,
                "stall_ms": max(stalls),
                "ping_p99_ms": percentile(stalls, 0.99),
                "live_p50_ms": percentile(late, 0.5) if late else nan,
                "live_p99_ms": percentile(late, 0.99) if late else nan,
            }
        )
    return told


@click.command()
@click.argument("rows", type=click.IntRange(1_000, 100_000_000))
@click.option("--master", default="local[2]", show_default=True, help='Or "cluster".')
@click.option(
    "--ledger-seconds",
    default=300,
    show_default=True,
    help="How long ledgers are kept; longer than a job takes to start.",
)
@click.option(
    "--latency-budget-ms",
    "budget_ms",
    default=DEFAULT_BUDGET_MS,
    show_default=True,
    help="The option of the jobs that write.",
)
@click.option("--write", type=click.Path(path_type=Path), help="Add the results to this page.")
def main(rows: int, master: str, ledger_seconds: int, budget_ms: int, write: Path | None) -> None:
    """Run the whole story on a fresh server, with this number of rows."""
    check_parser()
    # So that all processes that it has started end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with rig("ours", False) as made, client_of(made.url()):
        watch = Watch(made.url().removeprefix("delayed+"), made.directory)
        story = Story(made, watch, rows, master, ledger_seconds, budget_ms)
        write_rows(story.path, rows)
        with watch.running(), cluster(story), live_load(story):
            with story.step("live tasks alone") as step:
                time.sleep(ALONE_SECONDS)
                step.counts = "-"
            with archiving(story):
                for part in PARTS:
                    part(story)
            for part in LAST_PARTS:
                part(story)
        command = f'python -m tests.benchmarks.spark_story {rows} --master "{master}"'
        if budget_ms != DEFAULT_BUDGET_MS:
            command += f" --latency-budget-ms {budget_ms}"
        text = page(tell(story), rows, master, command, made.redis.info("server"), date.today())
    click.echo(text)
    if write:
        write.write_text(f"{write.read_text()}\n{text}" if write.exists() else text)


if __name__ == "__main__":
    main()
