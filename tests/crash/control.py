"""A task on a server and a worker of the stock transport that no fault strikes.

How late it starts is how long this machine makes a process wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kombu.utils.uuid import uuid

from tests.crash.app import make_app
from tests.crash.journal import Reader
from tests.crash.writing import WORKER
from tests.kit.servers import Server, start_server
from tests.kit.tasks_app import Settings
from tests.kit.workers import Worker

QUEUE = "control"
EVERY_SECONDS = 0.2


class Control:
    """Sends the task at intervals, in a thread."""

    def __init__(self, server: Server, journals: Path) -> None:
        journals.mkdir()
        self.settings = Settings(
            server.url.replace("socket:", "redis+socket:"), None, {}, str(journals)
        )
        self._sent: dict[str, float] = {}
        self._journals = journals
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def late(self) -> list[tuple[float, float]]:
        """When each was sent and when it started."""
        started = {
            line["id"]: line["at"]
            for line in Reader(self._journals).new_lines()
            if line["event"] == "start"
        }
        return [(at, started[id]) for id, at in self._sent.items() if id in started]

    def _send(self) -> None:
        app = make_app(self.settings)
        with app.producer_or_acquire() as producer:
            while not self._over.wait(EVERY_SECONDS):
                self._sent[id := uuid()] = time.time()
                app.send_task("run_early", task_id=id, queue=QUEUE, producer=producer)


@contextlib.contextmanager
def control_task(directory: Path) -> Iterator[Control]:
    """A server and a worker for it."""
    with start_server("valkey", directory / "server") as server:
        control = Control(server, directory / "journals")
        worker = Worker(
            control.settings,
            directory,
            name="control",
            module="tests.crash.app",
            pool="prefork",
            queues=(QUEUE,),
            env={WORKER: "control"},
        )
        worker.start()
        try:
            yield control
        finally:
            control.stop()
            worker.kill()
