"""Nodes of a Cluster fail, join and leave, and slots move: work continues, nothing is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Connection
from kombu.exceptions import OperationalError
from redis.crc import key_slot

from celery_ext import install
from celery_ext.metrics.names import PREFIX
from celery_ext.metrics.queues import registry_of
from celery_ext.policies import Limit
from kombu_delayed.errors import UNREACHABLE
from kombu_delayed.inspection.copies import Copies
from kombu_delayed.store.calls.shards import shard_name
from kombu_delayed.store.store import Store
from tests.kit.clusters import PASSWORD, Cluster
from tests.kit.inbox import Connect, Inbox
from tests.kit.ledger import Ledger
from tests.kit.mail import publish, queue_of
from tests.kit.producers import Producers
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

LEASE_SECONDS = 2.0


@pytest.fixture
def connect(connect_cluster: Connect) -> Connect:
    """Open connections to the Cluster."""
    return connect_cluster


def settings(
    cluster: Cluster, ledger: Ledger, backend: str | None = None, **options: Any
) -> Settings:
    options = {"delayed_lease_seconds": LEASE_SECONDS, "delayed_replicas_to_wait": 1, **options}
    return Settings(f"delayed+{cluster.url}", backend, options, str(ledger.path))


def sender(app: Celery, names: list[str]) -> Callable[[int], str]:
    """Sends to each queue in turn, every other task with a countdown."""

    def send(n: int) -> str:
        countdown = 0.3 if n % 2 else None
        queue = names[n % len(names)]
        return str(app.send_task("record", countdown=countdown, queue=queue, retry=False).id)

    return send


@pytest.mark.crash
@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_the_threads_of_leases_and_the_loop_find_the_slots(
    cluster: Cluster, names: list[str], ledger: Ledger, tmp_path: Path, pool: str
) -> None:
    """They are system threads, and a socket that one opens cannot be used by the others."""
    setup = settings(cluster, ledger, delayed_lease_seconds=1.0, delayed_replicas_to_wait=0)
    worker = Worker(setup, tmp_path, pool=pool, concurrency=2, queues=names)
    with worker, make_app(setup) as app:
        others_go_on(app, names, ledger)
        for name in names[:2]:
            old = cluster.master_of(name)
            old.kill()
            cluster.wait_for_failover(name, old)
            others_go_on(app, names, ledger)
            cluster.heal()
            # A thread that a node redirects renews at the new node until the other threads know.
            cluster.move(name, cluster.master_of(names[2]))
            others_go_on(app, names, ledger)
        assert worker.running
    assert not worker.mixed_threads()


@pytest.mark.crash
def test_a_slot_moves_under_load(
    cluster: Cluster, names: list[str], ledger: Ledger, tmp_path: Path
) -> None:
    """It moves there and back while its queue is used: nothing is lost or runs twice."""
    setup = settings(cluster, ledger, delayed_replicas_to_wait=0)
    worker = Worker(setup, tmp_path, pool="threads", concurrency=2, queues=names)
    home, other = cluster.master_of(names[0]), cluster.master_of(names[1])
    with worker, make_app(setup) as app, Producers(sender(app, names)) as producers:
        producers.send_more()
        backlog = [app.send_task("record", countdown=4, queue=names[0]).id for _ in range(300)]
        cluster.move(names[0], other, on_half=lambda: others_go_on(app, names[1:], ledger))
        producers.send_more()
        cluster.move(names[0], home)
        producers.send_more()
        producers.stop()
        ledger.wait_for_all([*producers.sent, *backlog], 30)
    assert {*ledger.runs().values()} == {1}
    assert worker.log.count(" ready.") == 1


def test_a_slot_moves_while_messages_go_to_their_gate(
    connect: Connect,
    cluster: Cluster,
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its messages arrive after the move, those of the node's other queues meanwhile."""
    limited, home = names[0], cluster.master_of(names[0])
    other = next(name for n in range(99) if cluster.master_of(name := f"other{n}") is home)
    # The sender knows no policies, so that the consumer finds messages without tickets.
    source, connection = connect(), connect(delayed_policies={limited: [Limit(concurrency=9)]})
    half_moved: list[str] = []

    def admit(store: Store, queue: str, *given: Any) -> int:
        if not half_moved:
            half_moved.append(queue)
            cluster.begin_move(limited, cluster.master_of(names[1]))
        return real_admit(store, queue, *given)

    real_admit = Store.admit
    monkeypatch.setattr(Store, "admit", admit)
    for n in range(3):
        publish(source, n, queue=queue_of(limited))
    inbox = Inbox(connection, queue_of(limited), queue_of(other))
    wait_until(lambda: inbox.drain(0.01) == [] and half_moved, "it moves")
    for n in range(3, 6):
        publish(source, n, queue=queue_of(other))
    assert sorted(inbox.receive(3)) == [3, 4, 5]
    cluster.move(limited, cluster.master_of(names[1]))
    assert sorted(inbox.receive(6)) == [*range(6)]
    assert "Lost the broker" not in caplog.text


def others_go_on(app: Celery, names: list[str], ledger: Ledger) -> None:
    ledger.wait_for_all([app.send_task("record", queue=name).id for name in names])


@pytest.mark.crash
def test_a_node_is_added(connect: Connect, cluster: Cluster, names: list[str]) -> None:
    """The node leaves again, too. A waiting consumer follows its queue without outside help."""
    patient = {"delayed_poll_seconds": 60}
    home = cluster.master_of(names[0])
    inbox, source = (
        Inbox(connect(**patient), queue_of(names[0])),
        connect(**patient),
    )
    publish(source, "first", queue=queue_of(names[0]))
    assert inbox.receive(1) == ["first"]
    inbox.drain(0.05)
    new = cluster.add_master()
    try:
        cluster.move(names[0], new)
        assert cluster.master_of(names[0]) is new
        publish(source, "second", queue=queue_of(names[0]))
        publish(source, "third", queue=queue_of(names[0]), delay_ms=100)
        assert inbox.receive(3) == ["first", "second", "third"]
    finally:
        cluster.move(names[0], home)
        cluster.remove(new)
    publish(source, "last", queue=queue_of(names[0]))
    assert inbox.receive(4)[3] == "last"


@pytest.mark.crash
def test_a_node_that_is_down_for_good(
    connect: Connect, cluster: Cluster, names: list[str], ledger: Ledger, tmp_path: Path
) -> None:
    """Its queues stop with a clear error and the others continue, even in a worker started now."""
    setup = settings(cluster, ledger, delayed_reconnect_seconds=1, delayed_replicas_to_wait=0)
    first = Worker(setup, tmp_path, name="first", pool="threads", concurrency=2, queues=names)
    with first, make_app(setup) as app:
        before = [app.send_task("record", queue=name).id for name in names]
        ledger.wait_for_all(before)
        waiting = app.send_task("record", countdown=2, queue=names[0]).id
        master = cluster.master_of(names[0])
        for server in (*cluster.replicas_of(master), master):
            server.kill()
        first.wait_for_log(f"nothing is consumed from {names[0]!r} until", 20)
        with pytest.raises(OperationalError, match=r"node .* of the Cluster cannot be reached"):
            app.send_task("record", queue=names[0], retry=False)
        others_go_on(app, names[1:], ledger)
        with Worker(
            setup, tmp_path, name="second", pool="threads", concurrency=2, queues=names
        ) as second:
            first.stop()
            others_go_on(app, names[1:], ledger)
            cluster.heal()
            ledger.wait_for_all([waiting, app.send_task("record", queue=names[0]).id])
            assert second.running
    assert first.log.count(" ready.") == 1


@pytest.mark.crash
def test_a_process_connects_while_any_one_node_is_down(connect: Connect, cluster: Cluster) -> None:
    """This includes the node that redis-py asks first."""
    for master in cluster.masters():
        down = (*cluster.replicas_of(master), master)
        for server in down:
            server.kill()
        with connect() as connection:
            assert connection.default_channel.store.run.everywhere()
        cluster.heal()


def test_gauges_of_the_queues_of_other_nodes_stay(cluster: Cluster, names: list[str]) -> None:
    with Celery(broker=f"delayed+{cluster.url}", set_as_current=False) as app:
        delayed = install(app)
        registry = registry_of(delayed, lambda: names)
        up, gauge = f"{PREFIX}broker_up", f"{PREFIX}ready_messages"
        assert registry.get_sample_value(up) == 1
        master = cluster.master_of(names[0])
        for server in (*cluster.replicas_of(master), master):
            server.kill()
        values = [registry.get_sample_value(gauge, {"queue": name}) for name in names]
        assert (registry.get_sample_value(up), values) == (0, [None, 0, 0])
        delayed.close()


@pytest.mark.crash
@pytest.mark.parametrize("lost", [0, 1])
def test_sends_go_on_over_the_other_shards(
    connect: Connect, cluster: Cluster, names: list[str], lost: int
) -> None:
    """Any node may be down, even the one with the shard count; all messages are found."""
    spread = {"delayed_shards": {names[0]: 3}}
    source, connection = connect(**spread), connect()
    publish(source, "first", queue=queue_of(names[0]))
    store = source.default_channel.store
    inbox = Inbox(connection, queue_of(names[0]))
    inbox.receive(1)
    master = cluster.master_of(store.keys(shard_name(names[0], lost)).wake)
    for server in (*cluster.replicas_of(master), master):
        server.kill()
    sent, delayed = [], []
    for client, name in ((source, "early"), (connect(**spread), "late")):
        for n in range(15):
            sent.append(f"{name} {n}")
            publish_again(client, sent[-1], names[0])
            delayed.append(f"delayed, {name} {n}")
            publish_again(client, delayed[-1], names[0], 3_600_000)
    assert sorted(inbox.receive(31)[1:]) == sorted(sent)
    cluster.heal()
    assert Copies(store, store.shards.all(names[0])).cancel(delayed) == [1] * 30
    publish(source, "last", queue=queue_of(names[0]))
    assert inbox.receive(32)[31] == "last"


def publish_again(connection: Connection, body: str, name: str, delay_ms: int = 0) -> None:
    """Publish it, and once more if the first attempt failed."""
    try:
        publish(connection, body, queue=queue_of(name), delay_ms=delay_ms, message_id=body)
    except connection.connection_errors:
        publish(connection, body, queue=queue_of(name), delay_ms=delay_ms, message_id=body)


@pytest.mark.crash
def test_a_consumer_of_plain_kombu(connect: Connect, cluster: Cluster, names: list[str]) -> None:
    """Acks for a node that is down wait; acks for other nodes do not."""
    connection, source = connect(), connect()
    inbox = Inbox(connection, *map(queue_of, names), ack=False)
    for name in names:
        publish(source, name, queue=queue_of(name))
    inbox.receive(3)
    old = cluster.master_of(names[0])
    old.kill()
    for message in inbox.messages:
        message.ack()
    store = source.default_channel.store
    wait_until(lambda: _unacked(store, names[1]) == _unacked(store, names[2]) == 0, "acked")
    cluster.wait_for_failover(names[0], old)
    inbox.drain(0.5)
    wait_until(lambda: inbox.drain(0.05) and _unacked(store, names[0]) == 0, "acked too")
    publish(source, "next", queue=queue_of(names[0]))
    assert inbox.receive(4)[3] == "next"


def _unacked(store: Any, name: str) -> int:
    with contextlib.suppress(*UNREACHABLE):
        return sum(count for _, _, count in store.leases.consumers(name))
    return -1


def test_acks_that_nodes_refuse_are_sent_again(
    connect: Connect, cluster: Cluster, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has lost its scripts, and nothing else is said that would bring its answer."""
    connection = connect()
    inbox = Inbox(connection, *map(queue_of, names), ack=False)
    for name in names * 2:
        publish(connection, "x", queue=queue_of(name))
    inbox.receive(6)
    known = {message.delivery_info["routing_key"]: message for message in inbox.messages}
    for message in known.values():
        message.ack()
    inbox.drain(0.05)
    inbox.stop_polling()
    monkeypatch.setattr(connection.default_channel, "_shards_at", float("inf"))
    for server in cluster.masters():
        with cluster.client(server) as client:
            client.script_flush()
    for message in inbox.messages:
        if message not in known.values():
            message.ack()
    with cluster.routed() as client:
        wait_until(
            lambda: inbox.drain(0.05) and not [*client.scan_iter("*:unacked:*")], "all are acked"
        )


@pytest.mark.parametrize("broken", ["begun", "half", "given up", "not told", "killed"])
def test_the_kit_finishes_a_broken_move(cluster: Cluster, names: list[str], broken: str) -> None:
    """A fault leaves a complete Cluster behind, however far the move had got on the servers."""
    name, slot = names[0], key_slot(names[0].encode())
    source, target = map(cluster.master_of, names[:2])
    with cluster.routed() as client:
        for n in range(30):
            client.set(f"{{{name}}}{n}", n)
    cluster.begin_move(name, target)
    with cluster.client(source) as old, cluster.client(target) as new:
        if broken != "begun":
            count = 30 if broken == "not told" else 10
            keys = old.execute_command("CLUSTER GETKEYSINSLOT", slot, count)
            there = ("127.0.0.1", target.port, "", 0, 5000, "AUTH", PASSWORD)
            old.execute_command("MIGRATE", *there, "KEYS", *keys)
        if broken == "given up":
            old.execute_command("CLUSTER SETSLOT", slot, "STABLE")
            new.execute_command("CLUSTER SETSLOT", slot, "STABLE")
        if broken == "not told":
            new.execute_command("CLUSTER SETSLOT", slot, "NODE", cluster.id_of(target))
    if broken == "killed":
        source.kill()
        cluster.wait_for_failover(name, source)
        source.start()
    wait_until(lambda: cluster.finish_move(name, target), "it is finished")
    cluster.heal()
    with cluster.routed() as client:
        assert [client.get(f"{{{name}}}{n}") for n in range(30)] == [b"%d" % n for n in range(30)]
    assert cluster.master_of(name) is target


def test_a_worker_starts_while_the_nodes_are_full(
    cluster: Cluster, ledger: Ledger, tmp_path: Path
) -> None:
    names = cluster.queues_apart()
    setup = settings(cluster, ledger)
    app = make_app(setup)
    ids = [sender(app, names)(n) for n in range(12)]
    clients = [cluster.client(server) for server in cluster.servers]
    try:
        for client in clients:
            client.config_set("maxmemory", 1)
        with Worker(setup, tmp_path, pool="threads", queues=names):
            ledger.wait_for_all(ids)
            for client in clients:
                client.config_set("maxmemory", 0)
            ledger.wait_for_all([sender(app, names)(n) for n in range(3)])
    finally:
        for client in clients:
            client.config_set("maxmemory", 0)
            client.close()
