"""Real Celery worker processes for tests, ended by their process ids."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

from tests.kit.tasks_app import Settings
from tests.kit.wait import wait_until

ROOT = Path(__file__).parents[2]
READY = " ready."
START_SECONDS = 90
STOP_SECONDS = 20


def heed_signals() -> None:
    """Let workers receive SIGINT and SIGQUIT from the beginning.

    Processes that a shell starts in the background ignore them, and so do their children until
    they reset them.
    """
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


#: Workers that were started and may still run.
_started: WeakSet[Worker] = WeakSet()


def last_words() -> Iterator[tuple[str, str]]:
    """The name and the end of the log of each worker, with thread stacks of running ones."""
    running = [each for each in _started if each.running]
    for each in running:
        each.send_signal(signal.SIGUSR1)  # Celery prints its threads then
    if running:
        time.sleep(1)
    for each in _started:
        yield each.name, each.log[-10_000:]


class Worker:
    """A worker process from `start` to `stop` or `kill`; a context manager does both.

    `command` replaces the Celery command line, to start a worker from a script. `root` has the
    code that it runs.
    """

    def __init__(
        self,
        settings: Settings,
        directory: Path,
        *,
        name: str = "w1",
        module: str = "tests.kit.tasks_app",
        pool: str = "solo",
        concurrency: int = 1,
        queues: Iterable[str] = ("celery",),
        options: Iterable[str] = (),
        global_options: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        command: Iterable[str] | None = None,
        gossip: bool = False,
        root: Path = ROOT,
    ) -> None:
        self.name = f"{name}@test"
        self.log_path = directory / f"{name}.log"
        self.command = list(command or ())
        self._root = root
        self._environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"}
        self._environment |= {**settings.environment(), **(env or {})}
        if not self.command:
            self.command = [sys.executable, "-m", "celery", "-A", module, *global_options]
            self.command += ["worker", "-P", pool, "-c", str(concurrency), "-n", self.name]
            self.command += ["-Q", ",".join(queues), "-l", "INFO"]
            # They cost a second at each start; tests of remote control switch them on.
            self.command += [] if gossip else ["--without-mingle", "--without-gossip"]
            self.command += options
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"worker {self.name} is not running")
        return self._process.pid

    @property
    def log(self) -> str:
        """The output since it was started last."""
        with open(self.log_path, "rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def mixed_threads(self) -> list[str]:
        """Warnings of gevent and eventlet about a thread that used an object of another thread."""
        said = ("greenlet.error", "different thread", "Second simultaneous")
        return [line for line in self.log.splitlines() if any(each in line for each in said)]

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, wait: bool = True) -> None:
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.command,
                cwd=self._root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _started.add(self)
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        try:
            self.wait_for_log(READY, START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def wait_for_log(self, text: str, timeout_seconds: float = 90) -> None:
        def found() -> bool:
            if text in self.log:
                return True
            if not self.running:
                raise AssertionError(f"worker {self.name} has ended:\n{self.log[-3000:]}")
            return False

        try:
            wait_until(found, f"worker {self.name} logs {text!r}", timeout_seconds, 0.02)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log[-3000:]}") from None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self, number: int = signal.SIGTERM, timeout_seconds: float = STOP_SECONDS) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        self.send_signal(number)
        return self.wait(timeout_seconds)

    def wait(self, timeout_seconds: float = STOP_SECONDS) -> int:
        process = self._process
        if process is None:
            raise RuntimeError(f"worker {self.name} is not running")
        try:
            code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            tail = self.log[-3000:]
            self.kill()
            raise AssertionError(
                f"worker {self.name} has not ended in {timeout_seconds:g} s:\n{tail}"
            ) from None
        _started.discard(self)
        self._end_group(process.pid)
        self._process = None
        return code

    def kill(self) -> None:
        """End it and the children of its pool at once, without cleanup."""
        _started.discard(self)
        if self._process is None:
            return
        process, self._process = self._process, None
        self._end_group(process.pid)
        process.wait()

    def _end_group(self, group: int) -> None:
        # Its session is its own: its process id is the group's, and only its children are in it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        if error is not None and self.log_path.exists():
            print(f"--- log of {self.name}\n{self.log[-5000:]}")
        if self.running and error is None:
            self.stop()
        else:
            self.kill()
