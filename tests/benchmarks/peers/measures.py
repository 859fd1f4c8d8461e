"""The measurements of each system: sending, running, lateness, and a killed worker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.rabbitmq import start_rabbitmq
from tests.benchmarks.peers.systems import PROGRAMS, System, node_modules
from tests.benchmarks.report import Figures, percentile
from tests.benchmarks.rig import WARM_UP, Worker, end
from tests.kit.servers import start_server
from tests.kit.wait import wait_until

RATE = 100
#: Tasks due at one instant, and how many seconds before it their worker is killed.
DUE, KILLED_SECONDS, IN_TIME_SECONDS = 1_000, 5, 2


class Peer:
    """A system with a fresh server of its own; its processes end with `stack`."""

    def __init__(self, system: System, directory: Path, stack: ExitStack) -> None:
        self.system = system
        self.directory = directory
        self._stack = stack
        self._workers = 0
        url = "memory://"
        if system.server == "rabbitmq":
            url = stack.enter_context(start_rabbitmq(directory / "server"))
        elif system.server:
            url = stack.enter_context(start_server(system.server, directory / "server", port=0)).url
        self._environment = {
            **os.environ,
            "NODE_PATH": node_modules() if shutil.which("npm") else "",
            "PYTHONPATH": str(PROGRAMS),
            "PEER_BROKER": system.url(url),
            "PEER_LEDGER": str(directory / "none"),
            **system.environment,
        }

    def call(self, command: str, *numbers: float) -> Any:
        """The result of a command of the system's program."""
        words = [self.system.program, command, *(str(each) for each in numbers)]
        done = subprocess.run(
            [self.system.executable(), *words],
            cwd=PROGRAMS,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=300,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])

    def worker(self, *words: str) -> Worker:
        """A worker with two slots, or the process that `words` start; it is not ready yet."""
        self._workers += 1
        ledger = self.directory / f"{self._workers}.ledger"
        log = ledger.with_suffix(".log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [self.system.executable(), *(words or self.system.worker)],
                cwd=PROGRAMS,
                env={**self._environment, "PEER_LEDGER": str(ledger)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._stack.callback(end, process)
        return Worker(process, ledger, log)


def sent(peer: Peer, quick: bool) -> Figures:
    return {"sent": peer.call("send", 500 if quick else 8_000)}


def run(peer: Peer, quick: bool) -> Figures:
    """Tasks per second that a new worker processes; all are there before it starts."""
    count = 1_000 if quick else 10_000
    if peer.system.server:
        peer.call("fill", count)
        worker = peer.worker()
    else:
        worker = peer.worker(peer.system.program, "alone", str(count))
    _await(worker, count, 240)
    starts = worker.starts()
    worker.kill()
    return {"run": (count - WARM_UP) / (starts[-1].at - starts[WARM_UP - 1].at)}


def lateness(peer: Peer, quick: bool) -> Figures:
    count = (5 if quick else 30) * RATE
    worker = peer.worker().await_ready()
    peer.call("steady", count, RATE)
    _await(worker, count, 40)
    late_ms = [(start.at - start.due) * 1000 for start in worker.starts()]
    worker.kill()
    return {"p50_ms": percentile(late_ms, 0.5), "p99_ms": percentile(late_ms, 0.99)}


def killed(peer: Peer, quick: bool) -> Figures:
    """Of 1,000 tasks due at one instant: how many another worker begins within 2 s."""
    first = peer.worker().await_ready()
    due = time.time() + (12 if quick else 15)
    peer.call("at", DUE, due)
    time.sleep(max(due - KILLED_SECONDS - time.time(), 0))
    first.kill()
    second = peer.worker().await_ready()
    time.sleep(max(due + IN_TIME_SECONDS + 1 - time.time(), 0))
    in_time = {start.number for start in second.starts() if start.at <= due + IN_TIME_SECONDS}
    second.kill()
    return {"in_time": len(in_time)}


def _await(worker: Worker, count: int, seconds: float) -> None:
    wait_until(lambda: worker.count() >= count, f"{count} tasks have started", seconds, 0.05)


MEASURES: tuple[Callable[[Peer, bool], Figures], ...] = (sent, run, lateness, killed)
