"""An extended app on a real server, and its workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery
from celery.result import AsyncResult

from celery_ext import install
from tests.kit.ledger import Ledger
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

MODULE = "tests.kit.installed_app"


@dataclass
class Bench:
    """An extended app with a result backend; its workers are started by the tests."""

    app: Celery
    settings: Settings
    ledger: Ledger
    directory: Path

    def worker(self, name: str = "w1", **options: Any) -> Worker:
        options = {"module": MODULE, "gossip": True, **options}
        return Worker(self.settings, self.directory, name=name, **options)

    def wait_for_answers(self, workers: int = 1) -> None:
        """Wait for workers: they receive broadcasts only some time after they report ready."""

        def answers() -> bool:
            found = self.app.control.ping(timeout=1, limit=workers)
            return len(found or ()) == workers

        wait_until(answers, f"{workers} workers answer", 60)

    def run_celery(self, *command: str) -> str:
        """Run a command of the Celery command line to its end; returns its output."""
        base = self.worker().command
        whole = [*base[: base.index("worker")], *command]
        program = Worker(self.settings, self.directory, name="command", command=whole)
        program.start(wait=False)
        code = program.wait(120)  # importing takes long on a busy machine
        assert code == 0, program.log
        return program.log

    def send(self, id: str, countdown: float = 3600, name: str = "record", **options: Any) -> Any:
        return self.app.send_task(name, task_id=id, countdown=countdown, **options)

    def signature(self, name: str, *args: Any, countdown: float = 3600, **options: Any) -> Any:
        return self.app.signature(name, args=args, countdown=countdown, **options)

    def backlog(self) -> set[str]:
        return {info.id for info in self.app.delayed.find()}

    def result(self, id: str) -> AsyncResult:
        return self.app.AsyncResult(id)


@contextmanager
def extended(server: Server, directory: Path, **config: Any) -> Iterator[Bench]:
    ledger = Ledger(directory / "ledger")
    results = f"redis://127.0.0.1:{server.port}/1"
    settings = Settings(f"delayed+{server.url}", results, {}, str(ledger.path), config)
    with ExitStack() as stack:
        app = stack.enter_context(make_app(settings))
        stack.callback(install(app).close)
        yield Bench(app, settings, ledger, directory)
