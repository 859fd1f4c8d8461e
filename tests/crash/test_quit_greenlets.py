"""A signal meets a greenlet of the pool, in which its handler then runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.crash


def test_a_worker_ends_whose_signal_meets_an_ack(server: Server, tmp_path: Path) -> None:
    """That greenlet has the lock of the connection, and the worker's own waits for it."""
    settings = Settings(f"delayed+{server.url}", ledger=str(tmp_path / "ledger"))
    make_app(settings).tasks["late"].delay()
    module = "tests.kit.quitting_app"
    worker = Worker(settings, tmp_path, module=module, pool="gevent", concurrency=4)
    worker.start(wait=False)
    try:
        wait_until(lambda: not worker.running, "the worker ends", 30)
        with server.client() as client:
            assert not client.exists("celery")
            assert not client.keys("{celery}:unacked:*")
    finally:
        worker.kill()
