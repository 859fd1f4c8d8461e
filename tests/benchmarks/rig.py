"""The environment of one measurement: a fresh server, workers and helpers, all ended with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import redis
from celery import Celery

from kombu_delayed.message.envelope import open_kept
from kombu_delayed.store.store import CALL_LIMIT, Entry, Store
from kombu_delayed.transport.server_checks import inspect
from tests.benchmarks.app import BROKER, LEDGER, LINE, QUEUE, Start, batch, create_app
from tests.kit.servers import Server, start_server
from tests.kit.wait import wait_until
from tests.kit.workers import ROOT

#: The first tasks pay for starting the worker and filling its prefetch buffer.
WARM_UP = 200
MONTH_MS = 30 * 86_400_000
T = TypeVar("T")


@dataclass
class Worker:
    process: subprocess.Popen[bytes]
    ledger: Path
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def await_ready(self, seconds: float = 30) -> Worker:
        wait_until(self._is_ready, f"the worker of {self.log} is ready", seconds)
        return self

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the worker ended:\n{self.log.read_text()[-2000:]}")
        return self.ledger.with_suffix(".ready").exists()

    def count(self) -> int:
        """How many tasks it has begun, without reading them."""
        return self.ledger.stat().st_size // LINE.size if self.ledger.exists() else 0

    def starts(self) -> list[Start]:
        """The tasks that it has begun, in order of time."""
        whole = self.ledger.read_bytes() if self.ledger.exists() else b""
        lines = LINE.iter_unpack(whole[: len(whole) // LINE.size * LINE.size])
        return sorted((Start(*line) for line in lines), key=lambda start: start.at)

    def kill(self) -> None:
        """SIGKILL for the worker and its pool."""
        end(self.process)


@dataclass
class Rig:
    """`side` is "stock" or "ours"; `quick` asks for small numbers."""

    side: str
    quick: bool
    directory: Path
    server: Server
    stack: contextlib.ExitStack
    workers: list[Worker] = field(default_factory=list)
    #: All processes that it has started.
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def scaled(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def url(self, port: int | None = None) -> str:
        prefix = "delayed+" if self.side == "ours" else ""
        return f"{prefix}redis://127.0.0.1:{port or self.server.port}/0"

    @cached_property
    def app(self) -> Celery:
        return self.stack.enter_context(create_app(self.url()))

    @cached_property
    def redis(self) -> redis.Redis:
        return self.stack.enter_context(self.server.client())

    def start_worker(
        self, *arguments: str, url: str | None = None, environment: dict[str, str] | None = None
    ) -> Worker:
        """Start a prefork worker with two processes; it is not ready yet."""
        ledger = self.directory / f"worker-{len(self.workers) + 1}.ledger"
        log = ledger.with_suffix(".log")
        command = ["celery", "-A", "tests.benchmarks.app", "worker", "-c", "2"]
        command += ["-n", f"{ledger.stem}@benchmarks", "--without-mingle", *arguments]
        environment = {BROKER: url or self.url(), LEDGER: str(ledger), **(environment or {})}
        worker = Worker(self.start(*command, environment=environment, log=log), ledger, log)
        self.workers.append(worker)
        return worker

    def start(
        self, *module: str, environment: dict[str, str] | None = None, log: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `python -m …`, ended with this rig; without a log its output is a pipe."""
        with contextlib.ExitStack() as opened:
            output: Any = opened.enter_context(log.open("wb")) if log else subprocess.PIPE
            process = subprocess.Popen(
                [sys.executable, "-m", *module],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output if log else None,
                start_new_session=True,
            )
        self.stack.callback(end, process)
        self.started.append(process)
        return process

    def apart(self, function: Callable[..., T], *arguments: Any, seconds: float = 120) -> T:
        """Call a function of a module in a process of its own."""
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            return pool.submit(function, *arguments).result(seconds)

    def send(self, tasks: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """Send tasks in a batch: arguments and options of each."""
        send_all(self.app, tasks)

    def await_done(self, count: int, seconds: float, workers: Sequence[Worker] = ()) -> None:
        watched = workers or self.workers
        started = lambda: sum(worker.count() for worker in watched) >= count  # noqa: E731
        wait_until(started, f"{count} tasks have started", seconds, interval_seconds=0.05)

    def drain(self, count: int, **options: Any) -> float:
        """Tasks per second that a new worker processes; all are there before it starts."""
        worker = self.start_worker(**options)
        self.await_done(count, 120, [worker])
        starts = worker.starts()
        worker.kill()
        return (count - WARM_UP) / (starts[-1].at - starts[WARM_UP - 1].at)

    def starts(self) -> list[Start]:
        found = [start for worker in self.workers for start in worker.starts()]
        return sorted(found, key=lambda start: start.at)


def send_all(app: Celery, tasks: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    with batch(app) as options:
        for arguments, own in tasks:
            app.tasks["work"].apply_async(arguments, **own, **options)


def cpu_seconds(client: redis.Redis) -> float:
    """The processor time that a server has used."""
    found: Any = client.info("cpu")
    return float(found["used_cpu_user"] + found["used_cpu_sys"])


def processor_seconds(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that `Rig.start` has started, with its children."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout:
        process.stdout.close()


@contextlib.contextmanager
def rig(side: str, quick: bool, kind: str = "valkey") -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="kombu-delayed-benchmark-")
        directory = Path(stack.enter_context(temporary))
        server = stack.enter_context(start_server(kind, directory / "server", port=0))
        yield Rig(side, quick, directory, server, stack)


# Backlogs that are too large to be sent one task at a time.


def store_of(rig: Rig) -> Store:
    """A store like that of a channel on this rig."""
    return Store(rig.redis, partition_size=inspect(rig.redis).partition_size)


def sample(rig: Rig, payload: int | None = None) -> tuple[str, str]:
    """Id and text of a message as Celery makes it, with `payload` bytes of arguments as JSON.

    The backlog stays empty.
    """
    # A list of one text takes four of them.
    argument = 1 if payload is None else "x" * (payload - 4)
    sent = rig.app.tasks["work"].apply_async((argument,), countdown=3600)
    stored: Any = rig.redis.hget(f"{{{QUEUE}}}:messages", sent.id)
    store_of(rig).purge(QUEUE)
    return sent.id, open_kept(stored).message.decode()


def fill(store: Store, queue: str, count: int, template: tuple[str, str]) -> None:
    """Schedule messages with new ids, due in the coming month except its first hour."""
    now_ms = int(time.time() * 1000)
    chance = random.Random(1)
    left = count
    while left:
        size = min(left, CALL_LIMIT)
        store.schedule(queue, list(entries(size, template, chance, now_ms)))
        left -= size


def entries(
    count: int, template: tuple[str, str], chance: random.Random, now_ms: int
) -> Iterator[Entry]:
    template_id, text = template
    for _ in range(count):
        id = str(uuid.uuid4())
        due_ms = now_ms + chance.randrange(3_600_000, MONTH_MS)
        yield Entry(id, 0, text.replace(template_id, id), str(due_ms))
