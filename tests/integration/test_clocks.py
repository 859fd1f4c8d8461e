"""Clocks that differ by an hour: the server's clock decides."""

from __future__ import annotations

import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from kombu import Connection

from tests.kit.inbox import Inbox
from tests.kit.ledger import Ledger
from tests.kit.mail import MAIL, publish
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

HOUR_SECONDS = 3600
LATE_SECONDS = 30  # any fault here is an hour; a busy machine is allowed to be this late


@pytest.mark.smoke
@pytest.mark.parametrize(("ahead", "pool"), [(HOUR_SECONDS, "prefork"), (-HOUR_SECONDS, "threads")])
def test_a_worker_runs_tasks_by_the_servers_clock(
    ledger: Ledger, tmp_path: Path, server: Server, ahead: int, pool: str
) -> None:
    options = {"delayed_poll_seconds": 0.5}
    settings = Settings(f"delayed+{server.url}", None, options, str(ledger.path))
    ours, stock = make_app(settings), make_app(Settings(server.url))
    command = f"-m tests.kit.skewed {ahead} worker -P {pool} -c 2 -l INFO --without-mingle"
    with Worker(settings, tmp_path, command=[sys.executable, *command.split()]) as worker:
        now = ours.send_task("record").id
        eta = datetime.now(timezone.utc) + timedelta(seconds=1.5)
        later = [
            *(ours.send_task("record", countdown=1 + 0.2 * n).id for n in range(3)),
            ours.send_task("record", eta=eta).id,
            stock.send_task("record", countdown=1.5).id,
        ]
        ledger.wait_for_all([now, *later])
        for id in later:
            (run,) = ledger.of(id)
            due = datetime.fromisoformat(run["eta"]).timestamp()
            assert 0 <= run["at"] - ahead - due < LATE_SECONDS
        direction = "behind" if ahead > 0 else "ahead of"
        assert f"The server's clock is 3600 seconds {direction} this machine's" in worker.log
        assert worker.log.count("The server's clock is") == 1


@pytest.mark.parametrize("ahead", [HOUR_SECONDS, -HOUR_SECONDS])
def test_a_clock_that_is_set_while_a_consumer_waits(
    server: Server, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    with Connection(f"delayed+{server.url}") as connection:
        inbox = Inbox(connection, MAIL)
        began = time.monotonic()
        publish(connection, "x", delay_ms=400)
        inbox.drain(0.1)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + ahead)
        inbox.stop_polling()
        assert inbox.receive(1) == ["x"]
        assert 0.4 <= time.monotonic() - began < HOUR_SECONDS
        wait_until(lambda: inbox.drain(0.05), "it is acked")
