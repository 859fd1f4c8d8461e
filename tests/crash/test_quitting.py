"""A signal reaches a worker at a moment that its pool does not expect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.ledger import Ledger
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = [pytest.mark.thorough, pytest.mark.crash]


@pytest.mark.parametrize("pool", ["gevent", "prefork"])
def test_a_worker_ends_whatever_its_signal_meets(server: Server, tmp_path: Path, pool: str) -> None:
    """A greenlet has the connection's lock, or the worker is reading the output of a process.

    The worker's own greenlet waits for that lock, and the process waits to be read.
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


@pytest.mark.parametrize("pool", ["eventlet", "gevent", "threads"])
def test_a_worker_ends_while_its_server_is_away(
    own_server: Server, tmp_path: Path, pool: str
) -> None:
    """Its heartbeat, which does not arrive, delays nothing: the tasks end when due."""
    settings = Settings(f"delayed+{own_server.url}", ledger=str(tmp_path / "ledger"))
    with make_app(settings) as app:
        app.tasks["sleep"].delay(4)
    worker = Worker(settings, tmp_path, pool=pool, concurrency=4)
    with worker:
        Ledger(tmp_path / "ledger").wait_for(1)
        own_server.stop()
        assert worker.stop() == 0
