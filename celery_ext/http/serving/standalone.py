"""`python -m celery_ext.http`: its app, which has only HTTP jobs, and the worker beside its server.

The worker is restarted if it ends unexpectedly. It reads its options from environment variables.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.utils.log import get_logger

from ..callbacks.jobs import register
from ..options import SETTING

#: Variables with the broker's URL, and the options as JSON; the server sets them for its worker.
BROKER, OPTIONS = "DELAYED_HTTP_BROKER", "DELAYED_HTTP_OPTIONS"

#: The queue of the jobs if no option names another one.
QUEUE = "http-jobs"

#: How long a worker may take to end, and how long to wait before it is restarted.
END_SECONDS, AGAIN_SECONDS = 30, 2

#: The variable with the file descriptor that a worker reads to learn that its server has ended.
LIFELINE = "DELAYED_HTTP_LIFELINE"

logger = get_logger(__name__)


def make_app(broker: str, options: Mapping[str, Any]) -> Celery:
    made = Celery("delayed-http", broker=broker, set_as_current=False)
    made.conf.update(
        task_default_queue=options.get("job_queue") or QUEUE,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=True,
        **{SETTING: dict(options)},
    )
    register(made)
    return made


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    end_with_server()
    return make_app(os.environ[BROKER], json.loads(os.environ.get(OPTIONS) or "{}"))


def end_with_server() -> None:
    """In a worker: shut down when its server has ended, even if the server was killed."""
    lifeline = os.environ.pop(LIFELINE, "")
    if lifeline:
        threading.Thread(target=_wait, args=[int(lifeline)], daemon=True).start()


def _wait(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGTERM)


class WorkerProcess:
    """`python -m celery worker` for HTTP jobs, from `start` to `stop`; a context manager."""

    def __init__(self, environment: Mapping[str, str], concurrency: int) -> None:
        # Never written to: a read returns when this process has ended, in any way.
        self._read, self._write = os.pipe()
        self._environment = {**os.environ, **environment, LIFELINE: str(self._read)}
        self._command = [sys.executable, "-m", "celery", "-A", "celery_ext.http.serving.standalone"]
        self._command += ["worker", "-P", "threads", "-c", str(concurrency), "-l", "INFO"]
        self._command += ["--without-mingle", "--without-gossip"]
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="delayed-http-worker")

    def __enter__(self) -> WorkerProcess:
        self._start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _start(self) -> None:
        # The worker has its own session: Ctrl-C reaches only the server, which ends the worker.
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[self._read],
        )

    def _watch(self) -> None:
        while self._process is not None:
            process = self._process
            while process.poll() is None and not self._stopping.wait(0.1):
                pass
            if self._stopping.is_set():
                self._end(process)
                return
            logger.warning(
                "The worker has ended with exit code %s; starting it again", process.returncode
            )
            if not self._stopping.wait(AGAIN_SECONDS):
                self._start_again()

    def _start_again(self) -> None:
        try:
            self._start()
        except OSError as error:  # such as too little memory: a later try may succeed
            logger.warning("The worker cannot be started: %s", error)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
