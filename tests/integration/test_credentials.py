"""Credentials that come from a provider, and change while connections last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection, Queue
from kombu.transport import redis as stock

from kombu_delayed.consumer.lease import keeper
from kombu_delayed.transport import server_checks
from tests.kit import mail
from tests.kit.credentials import (
    VARIABLE,
    StreamedCredentials,
    WatchedCredentials,
    make_user,
    users,
    wait_for_users,
)
from tests.kit.inbox import Connect, Inbox
from tests.kit.ledger import Ledger
from tests.kit.mail import NEWS
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not hasattr(stock.Channel, "maybe_reauth"), reason="new in Kombu 5.7"),
]

OLD, NEW = "ada", "grace"


@pytest.fixture(autouse=True)
def both_users(client: redis.Redis) -> Iterator[None]:
    for name in (OLD, NEW):
        make_user(client, name)
    yield
    client.acl_deluser(OLD, NEW)


@pytest.fixture
def provider() -> StreamedCredentials:
    return StreamedCredentials(OLD)


@pytest.fixture
def connect_as(server: Server, provider: StreamedCredentials) -> Iterator[Connect]:
    """Open connections with the provider; keyword arguments are transport options."""
    with ExitStack() as stack:

        def open_connection(**options: Any) -> Connection:
            url = f"delayed+{server.url}"
            connection = Connection(url, credential_provider=provider, transport_options=options)
            return stack.enter_context(connection)

        yield open_connection


@pytest.fixture
def connection(connect_as: Connect) -> Connection:
    return connect_as()


publish = partial(mail.publish, retry=True)


def in_a_batch(connection: Connection) -> None:
    producer = connection.Producer()
    with producer.batch():
        producer.publish("x", routing_key="mail")


SENDS: dict[str, Callable[[Connection], None]] = {
    "at once": lambda c: c.Producer().publish("x", routing_key="mail"),
    "later": lambda c: c.Producer().publish("x", routing_key="mail", headers={"x-delay": 60_000}),
    "to a declared queue": lambda c: publish(c, "x"),
    "in a batch": in_a_batch,
}


@pytest.mark.parametrize("send", SENDS.values(), ids=SENDS)
def test_a_producer_takes_new_credentials(
    connection: Connection,
    provider: StreamedCredentials,
    client: redis.Redis,
    send: Callable[[Connection], None],
) -> None:
    send(connection)
    wait_for_users(client, OLD)
    provider.change(NEW)
    send(connection)
    wait_for_users(client, NEW)


def test_a_consumer_takes_new_credentials(
    connect_as: Connect,
    provider: StreamedCredentials,
    client: redis.Redis,
    mail: Queue,
) -> None:
    connection = connect_as(
        health_check_interval=1, delayed_poll_seconds=0.2, delayed_lease_seconds=3
    )
    inbox = Inbox(connection, mail, NEWS)
    publish(connection, *range(5))
    inbox.receive(5)
    inbox.drain(0.2)
    wait_for_users(client, OLD)
    provider.change(NEW)
    wait_until(lambda: inbox.drain(0.2) and users(client) == {NEW}, "all are the new user's")
    publish(connection, "x", delay_ms=50)
    assert inbox.receive(6)[5] == "x"


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_connections_of_a_deleted_user_are_replaced(
    connect_as: Connect, provider: StreamedCredentials, client: redis.Redis, mail: Queue, told: bool
) -> None:
    connection, sender = connect_as(), connect_as()
    inbox = Inbox(connection, mail, NEWS, prefetch_count=3, ack=False)
    publish(sender, "held")
    publish(sender, "later", delay_ms=300)
    inbox.receive(1)
    inbox.drain(0.05)
    if told:
        provider.change(NEW)
    else:
        provider.user = NEW
    client.acl_deluser(OLD)
    publish(sender, "new")
    assert sorted(inbox.receive(3)) == ["held", "later", "new"]
    for message in inbox.messages:
        message.ack()
    inbox.drain(0.6)
    sender.Producer(exchange=NEWS.exchange).publish("news")
    assert inbox.receive(4)[3] == "news"
    wait_for_users(client, NEW)
    assert client.keys("{mail}:unacked:*") == []


@pytest.mark.smoke
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_worker_goes_on_with_new_credentials(
    server: Server, client: redis.Redis, ledger: Ledger, tmp_path: Path, pool: str
) -> None:
    who = tmp_path / "user"
    who.write_text(OLD)
    provider = f"{WatchedCredentials.__module__}.{WatchedCredentials.__name__}"
    options = {"reauth_check_interval": 0.2, "delayed_lease_seconds": 1}
    ours = Settings(
        f"delayed+{server.url}?credential_provider={provider}", None, options, str(ledger.path)
    )
    app = make_app(Settings(f"delayed+{server.url}"))
    with Worker(ours, tmp_path, pool=pool, concurrency=2, env={VARIABLE: str(who)}) as worker:
        for n in range(3):
            app.send_task("send_from_task", (f"child {n}", 0.1))
        ledger.wait_for_all([f"child {n}" for n in range(3)])
        wait_for_users(client, OLD)
        later = app.send_task("record", countdown=2).id
        who.write_text(NEW)
        app.send_task("send_from_task", ("told", 0.1))
        ledger.wait_for_all(["told"])
        wait_until(lambda: NEW in {c["user"] for c in client.client_list()}, "it has heard")
        client.acl_deluser(OLD)
        for n in range(3, 6):
            app.send_task("send_from_task", (f"child {n}", 0.1))
        ledger.wait_for_all([later, *(f"child {n}" for n in range(6))])
        wait_for_users(client, NEW)
        assert set(ledger.runs().values()) == {1}
        assert worker.running


def test_a_provider_by_import_path_leads_to_one_server(server: Server) -> None:
    """It is checked once, and one thread keeps all leases on it."""
    url = f"delayed+{server.url}?credential_provider=tests.kit.credentials.StreamedCredentials"
    known = len(server_checks._partition_sizes), len(keeper._keepers)
    for _ in range(3):
        with Connection(url) as connection:
            assert connection.channel().basic_get("mail") is None
    found = len(server_checks._partition_sizes), len(keeper._keepers)
    assert found == (known[0] + 1, known[1] + 1)
