"""Clocks that differ by an hour: what counts is the server's."""

from __future__ import annotations

import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from tests.kit.inbox import Inbox
from tests.kit.ledger import Ledger
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

HOUR_SECONDS = 3600
LATE_SECONDS = 30  # what goes wrong here is an hour, and the machine may be busy
MAIL = Queue("mail", Exchange("mail"), routing_key="mail")

skewed = pytest.mark.parametrize("ahead", [HOUR_SECONDS, -HOUR_SECONDS], ids=["ahead", "behind"])


def skewed_worker(
    settings: Settings, directory: Path, ahead_seconds: float, pool: str, name: str = "w1"
) -> Worker:
    command = [sys.executable, "-m", "tests.kit.skewed", str(ahead_seconds), "worker"]
    command += ["-P", pool, "-c", "2", "-n", f"{name}@test", "-l", "INFO"]
    return Worker(settings, directory, name=name, command=[*command, "--without-mingle"])


@pytest.fixture
def settings(server: Server, ledger: Ledger) -> Settings:
    return Settings(f"delayed+{server.url}", None, {"delayed_poll_seconds": 0.5}, str(ledger.path))


def in_seconds(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def lateness(run: dict[str, Any], ahead_seconds: float = 0) -> float:
    """Seconds between the ETA that a task saw and its run, in a process that is so much ahead."""
    return run["at"] - ahead_seconds - datetime.fromisoformat(run["eta"]).timestamp()


# Workers.


@pytest.mark.smoke
@pytest.mark.parametrize(("ahead", "pool"), [(HOUR_SECONDS, "prefork"), (-HOUR_SECONDS, "threads")])
def test_a_worker_runs_tasks_by_the_servers_clock(
    settings: Settings, ledger: Ledger, tmp_path: Path, server: Server, ahead: int, pool: str
) -> None:
    ours = make_app(settings)
    stock = make_app(Settings(server.url))
    with skewed_worker(settings, tmp_path, ahead, pool) as worker:
        now = ours.send_task("record").id
        later = [
            *(ours.send_task("record", countdown=1 + 0.2 * n).id for n in range(3)),
            ours.send_task("record", eta=in_seconds(1.5)).id,
            stock.send_task("record", countdown=1.5).id,
        ]
        ledger.wait_for_all([now, *later])
        late = {id: lateness(*ledger.of(id), ahead) for id in later}
        assert all(0 <= seconds < LATE_SECONDS for seconds in late.values()), late
        assert set(ledger.runs().values()) == {1}
        assert worker.log.count("The server's clock is") == 1
        direction = "behind" if ahead > 0 else "ahead of"
        assert f"The server's clock is 3600 seconds {direction} this machine's" in worker.log


# In this process, as its clock moves while it runs.


@skewed
def test_a_clock_that_is_set_while_a_consumer_waits(
    server: Server, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    with Connection(f"delayed+{server.url}") as connection:
        inbox = Inbox(connection, MAIL)
        producer = connection.Producer(exchange=MAIL.exchange, routing_key="mail")
        began = time.monotonic()
        producer.publish("x", headers={"x-delay": 400})
        inbox.drain(0.1)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + ahead)
        inbox.stop_polling()
        assert inbox.receive(1) == ["x"]
        assert 0.4 <= time.monotonic() - began < HOUR_SECONDS
        wait_until(lambda: inbox.drain(0.05), "it is acked")
