"""`delayed+sentinel://`: work goes on with the next master, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Exchange, Queue
from kombu.transport import redis as stock

from kombu_delayed.errors import OptionError, UrlError
from tests.kit.inbox import Inbox
from tests.kit.ledger import Ledger
from tests.kit.producers import Producers
from tests.kit.sentinels import SENTINEL_PASSWORD, Group, start_group
from tests.kit.servers import available_kinds, free_port
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

MAIL = Queue("mail", Exchange("mail"), routing_key="mail")
NEWS = Queue("reader", Exchange("news", type="fanout"))
LEASE_SECONDS = 1.0
SLOW_LEASE_SECONDS = 6.0
PATIENT = {"interval_start": 0.1, "interval_step": 0, "interval_max": 0.1, "max_retries": 200}


@pytest.fixture(scope="module")
def shared_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with start_group(available_kinds()[0], tmp_path_factory.mktemp("sentinel")) as group:
        yield group


@pytest.fixture
def group(shared_group: Group) -> Group:
    """A master without a key, two replicas and three Sentinels, all well."""
    shared_group.heal()
    with shared_group.client() as client:
        client.flushall()
        client.wait(2, 1000)
    return shared_group


@pytest.fixture
def connect(group: Group) -> Iterator[Callable[..., Connection]]:
    """Open connections that are closed at the end; keyword arguments are transport options."""
    with ExitStack() as stack:

        def open_connection(url: str = group.url, **options: Any) -> Connection:
            connection = Connection(
                f"delayed+{url}", transport_options={**group.options, **options}
            )
            return stack.enter_context(connection)

        yield open_connection


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def publish(connection: Connection, body: Any, queue: Queue = MAIL, delay_ms: int = 0) -> None:
    connection.Producer().publish(
        body,
        exchange=queue.exchange,
        routing_key=queue.routing_key,
        headers={"x-delay": delay_ms},
        declare=[queue],
        retry=True,
        retry_policy=PATIENT,
    )


# The way there.


@pytest.mark.smoke
def test_messages_pass(connect: Callable[..., Connection]) -> None:
    connection = connect()
    inbox, reader = Inbox(connection, MAIL), Inbox(connection, NEWS)
    inbox.drain(0.05)
    publish(connection, "later", delay_ms=100)
    publish(connection, "now")
    publish(connection, "news", NEWS)
    assert inbox.receive(2) == ["now", "later"]
    assert reader.receive(1) == ["news"]
    with connection.clone() as clone:
        assert clone.channel().store.size("mail") == (0, 0, 0)


def test_sentinels_that_are_down_at_the_start(
    group: Group, connect: Callable[..., Connection]
) -> None:
    for down in group.sentinels[:2]:
        down.stop()
    connection = connect()
    publish(connection, "x")
    assert Inbox(connection, MAIL).receive(1) == ["x"]


def test_no_sentinel_at_all(connect: Callable[..., Connection]) -> None:
    port = free_port()
    connection = connect(f"sentinel://127.0.0.1:{port}")
    with pytest.raises(connection.connection_errors) as caught:
        connection.transport.establish_connection()
    assert str(caught.value).startswith(
        f"no Sentinel names a master 'mymaster' that is up; 127.0.0.1:{port}: Error"
    )


def test_a_sentinel_with_another_password(connect: Callable[..., Connection]) -> None:
    connection = connect(sentinel_kwargs={"password": "wrong"})
    with pytest.raises(connection.connection_errors) as caught:
        connection.transport.establish_connection()
    assert "invalid username-password pair" in str(caught.value)
    assert "wrong" not in str(caught.value)


def test_a_server_instead_of_a_sentinel(group: Group, connect: Callable[..., Connection]) -> None:
    url = f"sentinel://127.0.0.1:{group.master.port}"
    connection = connect(url, sentinel_kwargs={"password": "pw"})
    with pytest.raises(connection.connection_errors, match="unknown command"):
        connection.transport.establish_connection()


def test_a_sentinel_instead_of_a_server(group: Group, connect: Callable[..., Connection]) -> None:
    connection = connect(f"redis://:{SENTINEL_PASSWORD}@127.0.0.1:{group.sentinels[0].port}/0")
    with pytest.raises(UrlError, match=r"is a Sentinel: .* delayed\+sentinel://.* master_name"):
        connection.connect()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "delayed+sentinel:// takes the transport option master_name; there is 'mymaster'"),
        (
            "other",
            "the Sentinels know no master 'other', which the transport option master_name names; "
            "there is 'mymaster'",
        ),
    ],
)
def test_a_master_of_no_such_name(connect: Callable[..., Connection], name: str, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        connect(master_name=name).connect()
    assert str(caught.value) == text


def test_too_few_other_sentinels(connect: Callable[..., Connection]) -> None:
    connect(min_other_sentinels=2).connect()
    connection = connect(min_other_sentinels=3)
    with pytest.raises(connection.connection_errors, match="no Sentinel names a master"):
        connection.transport.establish_connection()


def test_a_list_of_both_kinds(group: Group, connect: Callable[..., Connection]) -> None:
    with pytest.raises(UrlError, match="a list is either of Sentinels"):
        connect(f"{group.url};delayed+redis://127.0.0.1").connect()


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
    """The worker goes on without a restart, and so does it when the old master comes back."""
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
def test_a_task_that_outlasts_the_failover_runs_once(
    group: Group, ledger: Ledger, tmp_path: Path
) -> None:
    """Its worker is slow to come back, and its lease has ended by the next master's clock.

    The other one sees that, and does not take it for dead at once.
    """
    setup = settings(group, ledger, delayed_lease_seconds=SLOW_LEASE_SECONDS)
    with (
        Worker(setup, tmp_path, name="holder", pool="threads", concurrency=4) as holder,
        make_app(setup) as app,
    ):
        ids = [app.send_task("late", (12,)).id for _ in range(3)]
        ledger.wait_for(3)
        with group.client() as client:
            (name,) = client.zrange("{celery}:consumers", 0, -1)
        with Worker(setup, tmp_path, name="other", pool="threads", concurrency=4) as other:
            holder.send_signal(signal.SIGSTOP)
            old = group.kill_master()
            group.wait_for_failover(old)
            with group.client() as client:
                seconds, _ = client.time()
                ended_ms = (seconds - 1) * 1000
                client.zadd("{celery}:consumers", {name: ended_ms})
                looks = _looks(client)
                wait_until(lambda: _looks(client) > looks, "the other one looks at the leases")
                assert client.zscore("{celery}:consumers", name) == ended_ms
            holder.send_signal(signal.SIGCONT)
            ledger.wait(lambda all: [e["phase"] for e in all].count("end") >= 3, "they have ended")
            app.send_task("record")
            ledger.wait(lambda all: any(e["task"] == "record" for e in all), "the next one runs")
            assert "has stopped answering" not in other.log + holder.log
    assert all([e["phase"] for e in ledger.of(id)] == ["start", "end"] for id in ids)


def _looks(client: redis.Redis) -> int:
    """How often a consumer has looked at the leases of all: nothing else needs this command."""
    used = client.info("commandstats").get("cmdstat_zunion")  # type: ignore[union-attr]
    return int(used["calls"]) if used else 0


@pytest.mark.crash
def test_what_a_killed_worker_held_is_reclaimed_after_a_failover(
    group: Group, ledger: Ledger, tmp_path: Path
) -> None:
    setup = settings(group, ledger)
    holder = Worker(setup, tmp_path, name="holder", pool="threads", concurrency=4)
    with make_app(setup) as app:
        holder.start()
        held = app.send_task("late", (30,)).id
        ledger.wait_for(1)
        with Worker(setup, tmp_path, name="heir", pool="threads", concurrency=4) as heir:
            holder.kill()
            group.kill_master()
            ledger.wait(lambda all: len(all) == 2, "it runs again")
            assert [entry["id"] for entry in ledger.entries()] == [held, held]
            heir.kill()


@pytest.mark.crash
def test_plain_kombu(group: Group, connect: Callable[..., Connection]) -> None:
    """A consumer that is blocked, a fanout reader and a producer find the next master."""
    connection, source = connect(), connect(delayed_replicas_to_wait=1)
    inbox, reader = Inbox(connection, MAIL), Inbox(connection, NEWS)
    publish(source, "first")
    inbox.receive(1)
    publish(source, "delayed", delay_ms=4_000)
    old = group.kill_master()
    inbox.drain(0.5)
    publish(source, "next")
    assert group.master is not old
    assert inbox.receive(3, 15) == ["first", "next", "delayed"]
    publish(source, "news", NEWS)
    assert reader.receive(1) == ["news"]


@pytest.mark.crash
def test_a_master_that_stands_still(group: Group, connect: Callable[..., Connection]) -> None:
    """It closes no connection, and wakes up when another one is the master."""
    limits = {"socket_timeout": 1, "health_check_interval": 1, "delayed_poll_seconds": 60}
    connection, source = connect(**limits), connect(**limits, delayed_replicas_to_wait=1)
    inbox = Inbox(connection, MAIL)
    publish(source, "first")
    inbox.receive(1)
    inbox.drain(0.05)
    old = group.master
    os.kill(old.pid, signal.SIGSTOP)
    try:
        group.wait_for_failover(old)
        publish(source, "next")
        assert inbox.receive(2) == ["first", "next"]
    finally:
        os.kill(old.pid, signal.SIGCONT)
    group.heal()
    publish(source, "last")
    assert inbox.receive(3) == ["first", "next", "last"]


@pytest.mark.crash
@pytest.mark.skipif(not hasattr(stock.Channel, "client_name"), reason="new in Kombu 5.6")
def test_a_master_that_becomes_a_replica(group: Group, connect: Callable[..., Connection]) -> None:
    """It closes what it can, and refuses to be written to; every connection goes to the next."""
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
    """The last ones of our connections."""
    return {each["cmd"] for each in client.client_list() if each["name"] == "ours"}
