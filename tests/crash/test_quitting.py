"""A signal meets a worker in a moment that its pool does not expect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.crash


@pytest.mark.parametrize("pool", ["gevent", "prefork"])
def test_a_worker_ends_whatever_its_signal_meets(server: Server, tmp_path: Path, pool: str) -> None:
    """A greenlet that has the connection's lock, or the reading of what a process says.

    The worker's own greenlet waits for that lock, and the process for what it has said.
    """
    settings = Settings(f"delayed+{server.url}", ledger=str(tmp_path / "ledger"))
    make_app(settings).tasks["late"].delay()
    module = "tests.kit.quitting_app"
    worker = Worker(settings, tmp_path, module=module, pool=pool, concurrency=4)
    worker.start(wait=False)
    try:
        wait_until(lambda: not worker.running, "the worker ends", 30)
        with server.client() as client:
            assert not client.exists("celery")
            assert not client.keys("{celery}:unacked:*")
    finally:
        worker.kill()
