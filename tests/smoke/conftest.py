"""pytest-celery's nodes as local processes instead of containers: they need no Docker engine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.tasks_app import Settings
from tests.kit.workers import Worker

if TYPE_CHECKING:
    from celery import Celery

# It is not among the dependencies of the oldest supported versions.
collect_ignore_glob = [] if find_spec("pytest_celery") else ["test_*.py"]

TASKS = "pytest_celery.vendors.worker.tasks"
KIND = available_kinds()[0]


class ProcessContainer:
    """A process that answers the calls of pytest-celery's nodes to a container."""

    name: str

    @property
    def id(self) -> str:
        return self.name

    @property
    def status(self) -> str:
        raise NotImplementedError

    @property
    def celeryconfig(self) -> dict[str, Any]:
        return {}

    def ready(self) -> bool:
        return self.status == "running"

    def reload(self) -> None:
        """A container's state must be fetched; a process's is at hand."""

    def logs(self) -> str:
        raise NotImplementedError

    def kill(self, signal: str | int = "SIGKILL") -> None:
        raise NotImplementedError

    def restart(self, timeout: float) -> None:
        raise NotImplementedError

    def teardown(self) -> None:
        raise NotImplementedError


class ServerContainer(ProcessContainer):
    """A broker or a result backend: one database of a server."""

    def __init__(self, server: Server, database: int, scheme: str = "redis") -> None:
        self.name = f"{server.kind}-{server.port}-{database}"
        self.server = server
        self.url = f"{scheme}://127.0.0.1:{server.port}/{database}"

    @property
    def status(self) -> str:
        try:
            return "running" if self.server.pid else "exited"
        except RuntimeError:
            return "exited"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        return {"url": self.url, "host_url": self.url}

    def logs(self) -> str:
        return (self.server.directory / "server.log").read_text(errors="replace")

    def kill(self, signal: str | int = "SIGKILL") -> None:
        self.server.kill()

    def restart(self, timeout: float) -> None:
        self.server.restart()

    def teardown(self) -> None:
        self.server.stop()


class WorkerContainer(ProcessContainer):
    def __init__(self, worker: Worker) -> None:
        self.name = worker.name.partition("@")[0]
        self.worker = worker

    @property
    def status(self) -> str:
        return "running" if self.worker.running else "exited"

    def worker_name(self) -> str:
        return self.name

    def worker_queue(self) -> str:
        return "celery"

    def log_level(self) -> str:
        return "INFO"

    def version(self) -> str:
        from celery import __version__

        return str(__version__)

    def logs(self) -> str:
        return self.worker.log

    def kill(self, signal: str | int = "SIGKILL") -> None:
        number = _number(signal)
        if number == _number("SIGKILL"):
            self.worker.kill()
        else:
            self.worker.stop(number)

    def restart(self, timeout: float) -> None:
        if self.worker.running:
            self.worker.stop()
        self.worker.start()

    def teardown(self) -> None:
        self.worker.kill()


def _number(name: str | int) -> int:
    return signal.Signals[name].value if isinstance(name, str) else name


@pytest.fixture
def smoke_server(tmp_path: Path) -> Iterator[Server]:
    with start_server(KIND, tmp_path / "server", port=0, append_only=True) as server:
        yield server


@pytest.fixture
def celery_broker(smoke_server: Server) -> Iterator[Any]:
    from pytest_celery import CeleryTestBroker

    node = CeleryTestBroker(ServerContainer(smoke_server, 0, "delayed+redis"))
    yield node
    node.teardown()


@pytest.fixture
def celery_backend(smoke_server: Server) -> Any:
    from pytest_celery import CeleryTestBackend

    return CeleryTestBackend(ServerContainer(smoke_server, 1))


@pytest.fixture
def celery_worker_count() -> int:
    return 1


@pytest.fixture
def celery_worker_cluster(
    celery_broker: Any,
    celery_backend: Any,
    celery_setup_app: Celery,
    celery_worker_count: int,
    tmp_path: Path,
) -> Iterator[Any]:
    from pytest_celery import CeleryTestWorker, CeleryWorkerCluster

    settings = Settings(
        celery_broker.config()["url"],
        celery_backend.config()["url"],
        {"delayed_lease_seconds": 1.0},
        str(tmp_path / "ledger"),
        {"include": [TASKS]},
    )
    workers = [
        Worker(settings, tmp_path, name=f"worker{n}", pool="prefork", concurrency=2)
        for n in range(celery_worker_count)
    ]
    for worker in workers:
        worker.start(wait=False)
    nodes = [CeleryTestWorker(WorkerContainer(worker), celery_setup_app) for worker in workers]
    try:
        for worker in workers:
            worker.wait_until_ready()
        yield CeleryWorkerCluster(*nodes)
    finally:
        for node in nodes:
            node.teardown()
