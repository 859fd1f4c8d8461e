"""A master and a replica: what `delayed_replicas_to_wait` waits for, what a failover undoes."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import redis
from kombu import Connection, Producer

from kombu_delayed.connection.commands import Replicas
from kombu_delayed.errors import NotReplicated
from kombu_delayed.inspection.expectations import Correlation
from kombu_delayed.store.store import Store
from tests.kit.inbox import Connect, Inbox
from tests.kit.mail import MAIL
from tests.kit.questions import KEPT_MS, ask
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.state import entry
from tests.kit.wait import wait_until

DUE = "4102444800000"
WAITING = {"delayed_replicas_to_wait": 1, "delayed_replica_timeout_seconds": 0.05}
REFUSAL = (
    "the message is stored on the master, but only 0 of 1 replicas have it after 0.05 s "
    "(delayed_replicas_to_wait); a delayed one with a task id may be sent again"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    directory, kind = tmp_path_factory.mktemp("pair"), available_kinds()[0]
    at_once = {"repl-diskless-sync": "yes", "repl-diskless-sync-delay": "0"}
    with start_server(kind, directory / "master", port=0, config=at_once) as master:
        follows = {"replicaof": f"127.0.0.1 {master.port}"}
        with start_server(kind, directory / "replica", port=0, config=follows) as replica:
            yield master, replica


@pytest.fixture
def replica(pair: tuple[Server, Server]) -> Server:
    master, replica = pair
    with master.client() as client:
        client.flushall()
        wait_until(lambda: client.wait(1, 100), "the replica is in touch")
    return replica


@pytest.fixture
def client(pair: tuple[Server, Server], replica: Server) -> Iterator[redis.Redis]:
    with pair[0].client() as client:
        yield client


@pytest.fixture
def connect(pair: tuple[Server, Server], replica: Server) -> Iterator[Connect]:
    with ExitStack() as stack:

        def open_connection(**options: Any) -> Connection:
            connection = Connection(f"delayed+{pair[0].url}", transport_options=options)
            return stack.enter_context(connection)

        yield open_connection


def waiting(client: redis.Redis, timeout_ms: int = 50) -> Store:
    return Store(client, replicas=Replicas(1, timeout_ms))


SENDING: dict[str, Callable[[Store], Any]] = {
    "schedule": lambda store: store.schedule("q", [entry("a", DUE)]),
    "schedule_unique": lambda store: store.schedule_unique("q", entry("a", DUE), "key", "refuse"),
    "publish": lambda store: store.publish("q", [entry("a")]),
}


@pytest.mark.parametrize("send", SENDING.values(), ids=SENDING)
def test_who_waits_is_told(
    send: Callable[[Store], Any], client: redis.Redis, replica: Server
) -> None:
    store = waiting(client)
    with replica.standing_still():
        with pytest.raises(NotReplicated) as caught:
            send(store)
        assert str(caught.value) == REFUSAL
        assert sum(store.size("q")) == 1
    send(waiting(client, 30_000))
    with replica.client() as copy:
        assert copy.exists("{q}:messages", "q") == 1


@pytest.mark.parametrize("verb", ["schedule", "schedule_unique"])
def test_a_delayed_message_that_is_sent_again_is_kept_once(
    verb: str, client: redis.Redis, replica: Server
) -> None:
    """The second send, over another connection, waits for replication of the stored message."""
    with replica.standing_still():
        for _ in range(2):
            with pytest.raises(NotReplicated):
                SENDING[verb](waiting(client))
    SENDING[verb](waiting(client, 30_000))
    assert Store(client).size("q") == (0, 0, 1)


def test_what_follows_from_a_question_comes_when_its_end_is_replicated(
    client: redis.Redis, replica: Server
) -> None:
    """Otherwise a failover would forget that it has ended, and it could end in another way."""
    ask(Correlation(Store(client), "q"), "a")
    settle = ("n", "a", "timed_out", KEPT_MS)
    with replica.standing_still(), pytest.raises(NotReplicated):
        Correlation(waiting(client), "q").settle(*settle)
    assert Correlation(waiting(client, 30_000), "q").settle(*settle)


def test_a_script_that_the_server_does_not_know(client: redis.Redis) -> None:
    store = waiting(client, 30_000)
    client.script_flush()
    store.schedule("q", [entry("a", DUE)])
    client.script_flush()
    assert store.publish("q", [entry("b")]) == 1
    assert store.size("q") == (1, 0, 1)


def test_answers_stay_in_step(client: redis.Redis, replica: Server) -> None:
    store = waiting(client)
    with replica.standing_still(), pytest.raises(NotReplicated):
        store.publish("q", [entry("a")])
    client.set("{r}:wake", "no sorted set")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        store.publish("r", [entry("a")])
    assert store.run("ECHO", "in step") == b"in step"


def test_the_transport_option(connect: Connect, replica: Server) -> None:
    producer = connect(**WAITING).Producer(exchange=MAIL.exchange, routing_key="mail")
    producer.publish("x", declare=[MAIL])
    with replica.standing_still():
        for headers in ({}, {"x-delay": 60_000}):
            with pytest.raises(NotReplicated) as caught:
                producer.publish("x", headers=headers, retry=True)
            assert str(caught.value) == REFUSAL
    assert producer.channel.store.size("mail") == (2, 0, 1)


@pytest.mark.skipif(not hasattr(Producer, "batch"), reason="Producer.batch() is new in Kombu 5.7")
def test_a_batch(connect: Connect, replica: Server) -> None:
    from kombu.exceptions import BatchPublishError

    connection = connect(**WAITING)
    producer = connection.Producer(exchange=MAIL.exchange, routing_key="mail")
    MAIL(connection).declare()
    with producer.batch(max_size=2):
        for n in range(5):
            producer.publish(n)
    with replica.standing_still(), pytest.raises(BatchPublishError) as caught, producer.batch():
        producer.publish("x")
    assert str(caught.value.__cause__) == REFUSAL
    assert producer.channel.store.size("mail").ready == 6


@pytest.mark.parametrize(
    ("socket_timeout", "timeout_ms"), [(10, 9000), (60, 30_000), (None, 30_000)]
)
def test_the_wait_for_replicas_ends_before_the_connection_counts_as_lost(
    socket_timeout: float | None, timeout_ms: int, connect: Connect
) -> None:
    """Kombu would send the message again, although it is stored."""
    options = {"delayed_replicas_to_wait": 1, "delayed_replica_timeout_seconds": 30.0}
    channel = connect(socket_timeout=socket_timeout, **options).channel()
    assert channel.store.replicas == Replicas(1, timeout_ms)


def test_who_waits_at_a_master_that_is_replaced_sends_again(
    connect: Connect, client: redis.Redis, replica: Server
) -> None:
    """Its message may be lost with the old master, so the sender may not give up."""
    options = {**WAITING, "delayed_replica_timeout_seconds": 30.0, "socket_timeout": 60.0}
    # Before Kombu 5.7 an exchange that is an object stays bound to the channel that was closed.
    producer = connect(**options).Producer(routing_key="mail")
    send = partial(producer.publish, exchange="mail")
    send("first", declare=[MAIL])
    errors: list[Exception] = []

    def lead_again(error: Exception, seconds: float) -> None:
        errors.append(error)
        client.execute_command("REPLICAOF", "NO", "ONE")

    policy = {"errback": lead_again, "interval_start": 0, "max_retries": 5}
    with ThreadPoolExecutor(1) as pool:
        with replica.standing_still():
            sending = pool.submit(send, "x", retry=True, retry_policy=policy)
            wait_until(lambda: blocked(client) == 1, "the sender waits for the replica")
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            wait_until(lambda: errors or sending.done(), "the sender is told")
        sending.result()
    assert [str(error) for error in errors if "UNBLOCKED" in str(error)]
    assert producer.channel.store.size("mail").ready == 3


def blocked(client: redis.Redis) -> int:
    found: Any = client.info("clients")
    return int(found["blocked_clients"])


# Writes that have not reached the replica that becomes the master.


def test_an_ack_that_was_undone_is_sent_again(connect: Connect, client: redis.Redis) -> None:
    connection = connect()
    inbox = Inbox(connection, MAIL, ack=False)
    producer = connection.Producer(exchange=MAIL.exchange, routing_key="mail")
    for body in ("done", "held"):
        producer.publish(body)
    inbox.receive(2)
    (key,) = client.keys("{mail}:unacked:*")
    before: dict[Any, Any] = client.hgetall(key)  # type: ignore[assignment]
    inbox.messages[0].ack()
    wait_until(lambda: inbox.drain(0.01) and client.hlen(key) == 1, "it is acked")
    client.hset(key, mapping=before)
    client.client_kill_filter(_type="normal", skipme=True)
    wait_until(lambda: inbox.drain(0.01) and client.hlen(key) == 1, "it is acked again")
    (left,) = client.hvals(key)  # type: ignore[misc]
    assert b64encode(b"held") in left
