"""The guides' promises about workers, apart from the delay itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection

from tests.kit.credentials import make_user
from tests.kit.inbox import Inbox
from tests.kit.ledger import Ledger
from tests.kit.mail import MAIL
from tests.kit.proxy import Proxy
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

LEASE_SECONDS = 1.0


def settings(server: Server, ledger: Ledger, results: str | None = None, **config: Any) -> Settings:
    options = {"delayed_lease_seconds": LEASE_SECONDS}
    return Settings(f"delayed+{server.url}", results, options, str(ledger.path), config)


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_deduplication_of_what_is_delivered_again(
    server: Server, client: redis.Redis, ledger: Ledger, tmp_path: Path
) -> None:
    """A task was done but not acked when its worker died: the next worker only acks it."""
    results = f"redis://127.0.0.1:{server.port}/1"
    setup = settings(server, ledger, results, worker_deduplicate_successful_tasks=True)
    app = make_app(setup)
    done, other = "done-id", "other-id"
    with Connection(setup.broker_url) as connection:
        for id in (done, other):
            app.send_task("late", task_id=id)
        held = [connection.default_channel.basic_get("celery") for _ in range(2)]
        app.backend.mark_as_done(done, None)
        for message in held:
            message.requeue()
    with Worker(setup, tmp_path):
        ledger.wait(lambda all: len(all) == 2, "the other one has run")
        wait_until(lambda: not client.keys("{celery}:unacked:*"), "both are acked")
    assert [(e["id"], e["redelivered"]) for e in ledger.entries()] == [(other, True)] * 2


@pytest.mark.smoke
def test_no_password_in_what_a_worker_prints(
    server: Server, client: redis.Redis, ledger: Ledger, tmp_path: Path
) -> None:
    make_user(client, "ada")
    secret = "sesame"
    client.acl_setuser("ada", enabled=True, passwords=[f"+{secret}"])
    url = f"delayed+redis://ada:{secret}@127.0.0.1:{server.port}/0"
    with Proxy(server.port or 0) as proxy:
        through = url.replace(f":{server.port}/", f":{proxy.port}/")
        setup = Settings(through, None, {"delayed_reconnect_seconds": 0.2}, str(ledger.path))
        app = make_app(Settings(url))
        with Worker(setup, tmp_path, options=["-l", "DEBUG"]) as worker:
            ledger.wait_for_all([app.send_task("record", countdown=0.1).id])
            proxy.cut()
            worker.wait_for_log("Trying again")
            proxy.heal()
            ledger.wait_for_all([app.send_task("record", countdown=0.1).id])
    assert "transport:   delayed+redis://ada:**@127.0.0.1" in worker.log
    assert secret not in worker.log
    client.acl_deluser("ada")


def test_a_silent_connection_is_replaced(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kombu_delayed.connection.wakeup.GRACE_SECONDS", 0.5)
    options = {"health_check_interval": 1, "delayed_poll_seconds": 60}
    with Proxy(server.port or 0) as proxy:
        url = f"delayed+redis://127.0.0.1:{proxy.port}/0"
        with Connection(url, transport_options=options) as connection:
            inbox = Inbox(connection, MAIL)
            inbox.drain(0.1)
            wake = connection.default_channel.consumer.wakes[0]
            address = wake.socket.getsockname()
            (half_open,) = (
                side for side in proxy.sides if side.transport.get_extra_info("peername") == address
            )
            half_open.peer = None  # anything that either end sends from now on is lost
            said = "has not answered on a waiting connection"
            wait_until(lambda: inbox.drain(0.1) == [] and said in caplog.text, said, 60)
            assert wake.socket.getsockname() != address
            connection.Producer(exchange=MAIL.exchange).publish("x", routing_key="mail")
            assert inbox.receive(1) == ["x"]
