"""`delayed+sentinel://`: work continues with the next master, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import VERSION
from kombu.transport import redis as stock

from kombu_delayed.errors import OptionError, UrlError
from tests.kit import mail
from tests.kit.inbox import Connect, Inbox
from tests.kit.ledger import Ledger
from tests.kit.mail import MAIL, NEWS
from tests.kit.producers import Producers
from tests.kit.sentinels import SENTINEL_PASSWORD, Group
from tests.kit.servers import free_port
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

LEASE_SECONDS = 1.0
PATIENT = {"interval_start": 0.1, "interval_step": 0, "interval_max": 0.1, "max_retries": 200}


@pytest.fixture
def connect(connect_group: Connect) -> Connect:
    return connect_group


publish = partial(mail.publish, retry=True, retry_policy=PATIENT)


# The way there.


@pytest.mark.smoke
def test_messages_pass(connect: Connect) -> None:
    connection = connect()
    inbox, reader = Inbox(connection, MAIL), Inbox(connection, NEWS)
    inbox.drain(0.05)
    publish(connection, "later", delay_ms=100)
    publish(connection, "now")
    publish(connection, "news", queue=NEWS)
    assert inbox.receive(2) == ["now", "later"]
    assert reader.receive(1) == ["news"]
    with connection.clone() as clone:
        assert clone.channel().store.size("mail") == (0, 0, 0)


def test_sentinels_that_are_down_at_the_start(group: Group, connect: Connect) -> None:
    for down in group.sentinels[:2]:
        down.stop()
    connection = connect()
    publish(connection, "x")
    assert Inbox(connection, MAIL).receive(1) == ["x"]


def test_no_sentinel_that_answers(group: Group, connect: Connect) -> None:
    port = free_port()
    server_instead = f"sentinel://127.0.0.1:{group.master.port}"
    nothing = f"no Sentinel reports a running master 'mymaster'; 127.0.0.1:{port}: Error"
    for connection, text in (
        (connect(f"sentinel://127.0.0.1:{port}"), nothing),
        (connect(sentinel_kwargs={"password": "wrong"}), "invalid username-password pair"),
        (connect(min_other_sentinels=3), "no Sentinel reports a running master"),
        (connect(server_instead, sentinel_kwargs={"password": "pw"}), "unknown command"),
    ):
        with pytest.raises(connection.connection_errors) as caught:
            connection.transport.establish_connection()
        assert text in str(caught.value)
        assert "wrong" not in str(caught.value)
    connect(min_other_sentinels=2).connect()


def test_a_sentinel_instead_of_a_server(group: Group, connect: Connect) -> None:
    connection = connect(f"redis://:{SENTINEL_PASSWORD}@127.0.0.1:{group.sentinels[0].port}/0")
    with pytest.raises(UrlError, match=r"is a Sentinel: .* delayed\+sentinel://.* master_name"):
        connection.connect()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "",
            r"delayed\+sentinel:// needs the transport option master_name; there is 'mymaster'",
        ),
        ("other", "the Sentinels know no master 'other', .* master_name; they know 'mymaster'"),
    ],
)
def test_a_master_of_no_such_name(connect: Connect, name: str, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        connect(master_name=name).connect()


# Failover.


def sender(app: Celery) -> Callable[[int], str]:
    return lambda n: app.send_task("record", countdown=0.3 if n % 2 else None, retry=False).id


def settings(group: Group, ledger: Ledger, **options: Any) -> Settings:
    options = {"delayed_lease_seconds": LEASE_SECONDS, "delayed_replicas_to_wait": 1, **options}
    url = f"delayed+{group.url}"
    return Settings(url, None, {**group.options, **options}, str(ledger.path))


@pytest.mark.crash
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_the_master_is_killed_under_load(
    group: Group, ledger: Ledger, tmp_path: Path, pool: str
) -> None:
    """The worker continues without a restart, even when the old master comes back."""
    setup = settings(group, ledger)
    worker = Worker(setup, tmp_path, pool=pool, concurrency=2)
    with worker, make_app(setup) as app, Producers(sender(app)) as producers:
        producers.send_more()
        ledger.wait_for(10)
        old = group.kill_master()
        group.wait_for_failover(old)
        producers.send_more()
        group.heal()
        producers.send_more()
        producers.stop()
        ledger.wait_for_all(producers.sent)
        assert worker.running
    assert worker.log.count(" ready.") == 1
    assert "has stopped answering" not in worker.log
    with group.client() as client:
        assert client.exists("{celery}:granted-by", "{celery}:consumers") == 0


@pytest.mark.crash
@pytest.mark.skipif(VERSION < (5, 7), reason="older Kombu tries to declare without any pause")
def test_plain_kombu(group: Group, connect: Connect) -> None:
    """A consumer that is blocked, a fanout reader and a producer find the next master."""
    connection, source = connect(), connect(delayed_replicas_to_wait=1)
    inbox, reader = Inbox(connection, MAIL), Inbox(connection, NEWS)
    publish(source, "first")
    inbox.receive(1)
    publish(source, "delayed", delay_ms=4_000)
    old = group.kill_master()
    inbox.drain(0.5)
    publish(source, "next")
    group.wait_for_failover(old)  # some Sentinels may name the old one yet
    assert inbox.receive(3, 15) == ["first", "next", "delayed"]
    publish(source, "news", queue=NEWS)
    assert reader.receive(1) == ["news"]


@pytest.mark.crash
def test_a_master_that_stands_still(group: Group, connect: Connect) -> None:
    """It closes no connection, and wakes up after another server has become the master."""
    limits = {"socket_timeout": 1, "health_check_interval": 1, "delayed_poll_seconds": 60}
    connection, source = connect(**limits), connect(**limits, delayed_replicas_to_wait=1)
    inbox = Inbox(connection, MAIL)
    publish(source, "first")
    inbox.receive(1)
    inbox.drain(0.05)
    old = group.master
    with old.standing_still():
        group.wait_for_failover(old)
        publish(source, "next")
        assert inbox.receive(2) == ["first", "next"]
    group.heal()
    publish(source, "last")
    assert inbox.receive(3) == ["first", "next", "last"]


@pytest.mark.crash
@pytest.mark.skipif(not hasattr(stock.Channel, "client_name"), reason="new in Kombu 5.6")
def test_a_master_that_becomes_a_replica(group: Group, connect: Connect) -> None:
    """It closes what it can and refuses writes; every connection moves to the next master."""
    connection, source = connect(client_name="ours"), connect(client_name="ours")
    inbox = Inbox(connection, MAIL, ack=False)
    Inbox(connection, NEWS)
    publish(source, "first")
    inbox.receive(1)

    def waits(client: redis.Redis) -> bool:
        inbox.drain(0.05)
        return _commands(client) >= {"bzpopmin", "psubscribe"}

    with group.client() as client:
        wait_until(lambda: waits(client), "the consumer waits")
    old = group.fail_over()
    publish(source, "next")
    assert inbox.receive(2) == ["first", "next"]
    with group.client() as client:
        wait_until(lambda: waits(client), "the consumer waits there")
    with group.client(old) as client:
        assert _commands(client) == set()
    for message in inbox.messages:
        message.ack()
    connection.release()
    with group.client() as client:
        assert client.keys("{mail}:unacked:*") == []


def _commands(client: redis.Redis) -> set[str]:
    """The last commands of our connections."""
    return {each["cmd"] for each in client.client_list() if each["name"] == "ours"}
