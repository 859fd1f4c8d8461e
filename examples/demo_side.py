"""One side of the comparison: a server of its own, its workers, and what their ledgers say."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import redis
from demo_tasks import create_app, read_ledger

from kombu_delayed import embedded

QUEUE = "celery"
START_SECONDS = 30
STOP_SECONDS = 5
#: A task is acked just after it has ended; a kill in between makes it run again.
ACK_SECONDS = 0.25


@dataclass
class Run:
    """One execution of a task."""

    number: int
    worker: str
    started: float
    ended: float | None = None


@dataclass
class Worker:
    name: str
    process: subprocess.Popen[bytes]
    ledger: Path
    log: Path
    killed_at: float | None = None

    @property
    def ready(self) -> bool:
        return any(event == "ready" for event, _, _ in read_ledger(self.ledger))

    def runs(self) -> Iterator[Run]:
        running: dict[int, Run] = {}
        for event, number, at in read_ledger(self.ledger):
            if event == "start":
                running[number] = Run(number, self.name, at)
            elif event == "end":
                run = running.pop(number)
                run.ended = at
                yield run
        yield from running.values()

    def kill(self) -> None:
        """SIGKILL for the worker and its pool, as when the machine's power fails."""
        self.killed_at = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def held(self, run: Run) -> bool:
        """Whether the worker had not finished and acked a run when it was killed."""
        if self.killed_at is None or run.worker != self.name:
            return False
        return run.ended is None or run.ended > self.killed_at - ACK_SECONDS


@dataclass
class Side:
    """`title` is the scheme of the broker URL, with `delayed+` or without."""

    title: str
    directory: Path
    delayed: bool
    workers: list[Worker] = field(default_factory=list)
    #: Task number -> when it is due.
    due: dict[int, float] = field(default_factory=dict)

    def start_server(self) -> None:
        self.directory.mkdir(mode=0o700)
        socket = embedded.ensure(self.directory / "broker")
        stock = f"redis+socket://{socket}?virtual_host=0"
        self.url = f"delayed+embedded://{self.directory}/broker" if self.delayed else stock
        self.app = create_app(self.url)
        self.redis = redis.Redis(unix_socket_path=str(socket))

    def start_worker(self) -> Worker:
        name = f"worker-{len(self.workers) + 1}"
        ledger, log = self.directory / f"{name}.ledger", self.directory / f"{name}.log"
        command = [sys.executable, "-m", "celery", "-A", "demo_tasks", "worker", "-c", "2"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "-n", f"{name}@demo", "--without-mingle"],
                cwd=Path(__file__).parent,
                env={**os.environ, "DEMO_BROKER": self.url, "DEMO_LEDGER": str(ledger)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends its workers
            )
        self.workers.append(Worker(name, process, ledger, log))
        return self.workers[-1]

    def schedule(self, number: int, countdown: float) -> None:
        self.due[number] = time.time() + countdown
        self.app.tasks["remind"].apply_async((number,), countdown=countdown)

    def stop(self) -> None:
        for worker in self.workers:
            worker.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(deadline - time.monotonic(), 0))
            if worker.process.returncode is None:
                worker.kill()
        embedded.stop(self.directory / "broker")

    def state(self) -> State:
        runs = [run for worker in self.workers for run in worker.runs()]
        return State(self, sorted(runs, key=lambda run: run.started), time.time())

    def in_redis(self) -> int:
        if not self.delayed:
            return int(self.redis.llen(QUEUE))
        return int(self.redis.hlen(f"{{{QUEUE}}}:messages")) + int(self.redis.llen(QUEUE))

    def in_workers(self) -> int:
        if not self.delayed:
            return int(self.redis.hlen("unacked"))
        keys = self.redis.scan_iter(f"{{{QUEUE}}}:unacked:*")
        return sum(int(self.redis.hlen(key)) for key in keys)


@dataclass
class State:
    """What has happened on one side until `now`."""

    side: Side
    runs: list[Run]
    now: float

    def __post_init__(self) -> None:
        self.first: dict[int, Run] = {}
        for run in self.runs:
            self.first.setdefault(run.number, run)
        self.done = {run.number for run in self.runs if run.ended is not None}
        # What the kill interrupted counts as late until it has run to its end.
        finished = {run.number: run for run in reversed(self.runs) if run.ended is not None}
        self.lateness = sorted(
            (run.started - self.side.due[number]) * 1000 for number, run in finished.items()
        )

    @property
    def delayed(self) -> int:
        return sum(due > self.now for due in self.side.due.values())

    @property
    def overdue(self) -> int:
        return sum(
            due <= self.now and number not in self.done for number, due in self.side.due.items()
        )

    @property
    def missing(self) -> int:
        return len(self.side.due) - len(self.done)

    @property
    def repeats(self) -> list[Run]:
        """Second and later executions."""
        return [run for run in self.runs if run is not self.first[run.number]]

    @property
    def interrupted(self) -> int:
        """Repeats of what was executing when its worker was killed: nobody could know better."""
        return sum(
            any(worker.held(self.first[run.number]) for worker in self.side.workers)
            for run in self.repeats
        )

    @property
    def run_twice(self) -> int:
        return len(self.repeats) - self.interrupted

    def percentile(self, share: float) -> float | None:
        if not self.lateness:
            return None
        return self.lateness[min(int(share * len(self.lateness)), len(self.lateness) - 1)]

    def done_by(self, worker: Worker) -> int:
        return sum(run.worker == worker.name and run.ended is not None for run in self.runs)
