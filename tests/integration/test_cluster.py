"""`delayed+rediscluster://`: what plain Kombu does, with queues on three nodes."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest
from kombu import Connection, Exchange, Producer, Queue
from kombu.transport import redis as stock

from celery_ext.policies import Fair, Limit
from kombu_delayed.errors import NotReplicated, OptionError, ServerError, ServerNotReady
from kombu_delayed.store.keys import format_version
from tests.kit.clusters import Cluster
from tests.kit.inbox import Connect, Inbox
from tests.kit.mail import publish, queue_of
from tests.kit.servers import Server, free_port
from tests.kit.wait import wait_until


@pytest.fixture
def connect(connect_cluster: Connect) -> Connect:
    """Open connections to the Cluster."""
    return connect_cluster


@pytest.fixture
def queues(names: list[str]) -> list[Queue]:
    """Three queues, each on a different node."""
    return [queue_of(name) for name in names]


def keys_of(cluster: Cluster) -> set[str]:
    with cluster.routed() as client:
        return {key.decode() for key in client.scan_iter("*")} - {format_version()}


@pytest.mark.smoke
def test_messages_pass(connect: Connect, queues: list[Queue]) -> None:
    source, connection = connect(), connect()
    inbox = Inbox(connection, *queues)
    inbox.drain(0.05)
    for queue in queues:
        publish(source, f"now {queue.name}", queue=queue)
    assert {*inbox.receive(3)} == {f"now {queue.name}" for queue in queues}
    for queue in queues:
        publish(source, f"later {queue.name}", queue=queue, delay_ms=300)
    assert {*inbox.receive(6)[3:]} == {f"later {queue.name}" for queue in queues}


@pytest.mark.skipif(not hasattr(Producer, "batch"), reason="Producer.batch() is new in Kombu 5.7")
def test_a_batch_over_all_nodes(connect: Connect, queues: list[Queue]) -> None:
    news = Exchange("news", type="fanout")
    reader = Inbox(connect(), Queue("reader", news))
    reader.drain(0.05)
    producer = connect(delayed_replicas_to_wait=1).Producer()
    inbox = Inbox(connect(), *queues)
    with producer.batch(max_size=50):
        for n in range(300):
            headers = {"x-delay": 200 if n % 2 else 0}
            name = queues[n % 3].name
            producer.publish(n, exchange=name, routing_key=name, headers=headers)
        producer.publish("news", exchange=news, declare=[news])
    assert sorted(inbox.receive(300)) == [*range(300)]
    assert reader.receive(1) == ["news"]


def test_replicas_have_what_was_sent(connect: Connect, queues: list[Queue]) -> None:
    for queue in queues:
        publish(connect(delayed_replicas_to_wait=1), "x", queue=queue, delay_ms=60_000)


def test_nothing_is_stored_on_a_node_with_too_few_replicas(
    connect: Connect, queues: list[Queue]
) -> None:
    """As with Sentinel. The master of a failover has none at first."""
    too_many = {"delayed_replicas_to_wait": 2, "delayed_replica_timeout_seconds": 0.05}
    with pytest.raises(ServerNotReady, match=r"1 of 2 replicas .* nothing was stored"):
        publish(connect(**too_many), "x", queue=queues[0])
    assert sum(connect().default_channel.store.size(queues[0].name)) == 0


def test_a_replica_that_fails_later(
    connect: Connect, cluster: Cluster, queues: list[Queue]
) -> None:
    waiting = connect(delayed_replicas_to_wait=1, delayed_replica_timeout_seconds=0.05)
    wait_until(lambda: _is_sent(waiting, queues[0]), "the replica is in touch")
    (replica,) = cluster.replicas_of(cluster.master_of(queues[0].name))
    before = waiting.default_channel.store.size(queues[0].name).ready
    with replica.standing_still(), pytest.raises(NotReplicated):
        publish(waiting, "x", queue=queues[0])
    assert waiting.default_channel.store.size(queues[0].name).ready == before + 1


def _is_sent(connection: Connection, queue: Queue) -> bool:
    with suppress(ServerNotReady, NotReplicated):
        publish(connection, "first", queue=queue)
        return True
    return False


def test_a_token_goes_to_who_waits_longest(connect: Connect, queues: list[Queue]) -> None:
    """No consumer polls here, and all get their turn."""
    source = connect(delayed_poll_seconds=60)
    inboxes = [Inbox(connect(delayed_poll_seconds=60), queues[0]) for _ in range(3)]
    for inbox in inboxes:
        _wait_for_all_to_listen([inbox])
    for n in range(6):
        publish(source, n, queue=queues[0])
        wait_until(lambda: _drained(inboxes) > n, "it came")  # noqa: B023
        _wait_for_all_to_listen(inboxes)
    assert [inbox.bodies for inbox in inboxes] == [[0, 3], [1, 4], [2, 5]]


def _drained(inboxes: list[Inbox]) -> int:
    return sum(len(inbox.drain(0.01)) for inbox in inboxes)


def _wait_for_all_to_listen(inboxes: list[Inbox]) -> None:
    """A consumer may have stopped listening while it handled its last message."""

    def all_listen() -> bool:
        _drained(inboxes)
        return not any(inbox.consumer.channel.consumer.idle for inbox in inboxes)

    wait_until(all_listen, "all listen")


def test_a_token_passes_over_who_has_gone(connect: Connect, queues: list[Queue]) -> None:
    gone, there = (Inbox(connect(delayed_poll_seconds=60), queues[0]) for _ in range(2))
    gone.drain(0.05)
    there.drain(0.05)
    for wake in gone.consumer.channel.consumer.wakes:
        wake.connection.disconnect()
    publish(connect(), "x", queue=queues[0])
    assert there.receive(1) == ["x"]


def test_a_token_for_later_keeps_nobody_from_those_for_now(
    connect: Connect, queues: list[Queue]
) -> None:
    """No consumer polls here. The last message is due before those that were promised."""
    source = connect()
    inbox = Inbox(connect(delayed_poll_seconds=60), queues[0])
    inbox.drain(0.05)
    inbox.stop_polling()
    for body, late_ms, delay_ms in (("a", 3_600_000, 0), ("b", 3_000_000, 0), ("c", 30_000, 200)):
        publish(source, "late", queue=queues[0], delay_ms=late_ms)
        inbox.drain(0.05)
        publish(source, body, queue=queues[0], delay_ms=delay_ms)
        inbox.receive(len(inbox.messages) + 1)
    assert inbox.bodies == ["a", "b", "c"]


@pytest.mark.skipif(not hasattr(stock.Channel, "client_name"), reason="new in Kombu 5.6")
def test_one_connection_a_node(connect: Connect, cluster: Cluster) -> None:
    """This is independent of the number of queues it waits for."""
    queues = [queue_of(f"q{n}") for n in range(12)]
    inbox = Inbox(connect(client_name="ours"), *queues)
    inbox.drain(0.05)
    for master in cluster.masters():
        with cluster.client(master) as client:
            found = [each for each in client.client_list() if each["name"] == "ours"]
        assert sum({each["sub"], each.get("ssub", "0")} > {"0"} for each in found) == 1


def test_prefetch_is_of_the_whole_consumer(connect: Connect, queues: list[Queue]) -> None:
    """And each node gets its turn."""
    source = connect()
    for n in range(30):
        publish(source, n, queue=queues[n % 3])
    inbox = Inbox(connect(), *queues, prefetch_count=6, ack=False)
    inbox.receive(6)
    inbox.drain(0.2)
    assert len(inbox.messages) == 6
    assert {message.delivery_info["routing_key"] for message in inbox.messages} == {
        queue.name for queue in queues
    }


@pytest.mark.parametrize("nodes", [2, 3])
def test_one_message_at_a_time_is_of_each_node_in_turn(
    connect: Connect, queues: list[Queue], nodes: int
) -> None:
    """A backlog on one node does not delay messages of the other nodes."""
    source = connect()
    for n in range(12 * nodes):
        publish(source, n, queue=queues[n % nodes])
    inbox = Inbox(connect(), *queues[:nodes], prefetch_count=1)
    inbox.receive(4 * nodes)
    counts = Counter(message.delivery_info["routing_key"] for message in inbox.messages)
    assert [counts[queue.name] for queue in queues[:nodes]] == [4] * nodes


def test_consumers_have_turns_and_limits(connect: Connect, queues: list[Queue]) -> None:
    policies = {queue.name: [Fair(), Limit(concurrency=2)] for queue in queues}
    source, connection = (connect(delayed_policies=policies) for _ in range(2))
    for queue in queues:
        for tenant in "aab":
            publish(source, f"{tenant} {queue.name}", queue=queue, headers={"tenant": tenant})
    channel = connection.default_channel
    for queue in queues:
        found = [channel.basic_get(queue.name) for _ in range(3)]
        assert [each and each.decode()[0] for each in found] == ["a", "b", None]
        found[0].ack()
        assert channel.basic_get(queue.name).decode()[0] == "a"


def test_nothing_is_left_of_a_consumer(
    connect: Connect, cluster: Cluster, queues: list[Queue]
) -> None:
    source, connection = connect(delayed_events=0), connect(delayed_events=0)
    inbox = Inbox(connection, *queues)
    for queue in queues:
        publish(source, "x", queue=queue)
    inbox.receive(3)
    connection.release()
    assert {key for key in keys_of(cluster) if not key.startswith("_kombu.")} == set()


def test_size_purge_and_delete(connect: Connect, cluster: Cluster, queues: list[Queue]) -> None:
    channel = connect(delayed_shards=4).channel()
    queues[0](channel).declare()
    source = connect(delayed_shards=4, delayed_events=0)
    for n in range(20):
        publish(source, n, queue=queues[0], correlation_id=str(n))
        publish(source, n, queue=queues[0], delay_ms=60_000)
    assert channel.queue_declare(queues[0].name, passive=True).message_count == 20
    assert channel.queue_purge(queues[0].name) == 40
    assert channel.queue_declare(queues[0].name).message_count == 0
    channel.queue_delete(queues[0].name)
    assert keys_of(cluster) == set()


def test_the_lease_of_the_dead_ends(
    connect: Connect, cluster: Cluster, queues: list[Queue]
) -> None:
    source = connect()
    dead = connect(delayed_lease_seconds=1)
    held = Inbox(dead, *queues, ack=False)
    for queue in queues:
        publish(source, queue.name, queue=queue)
    held.receive(3)
    held.consumer.channel.consumer.lease.end()  # nobody renews any more
    heir = Inbox(connect(delayed_lease_seconds=1), *queues)
    assert {*heir.receive(3)} == {queue.name for queue in queues}
    assert all(message.delivery_info["redelivered"] for message in heir.messages)
    held.consumer.channel.consumer.lease.lost = True


def test_nodes_that_have_lost_their_data_know_the_lease_again(
    connect: Connect, cluster: Cluster, no_keeper: None
) -> None:
    """The thread of a node registers all queues there in one step, and the loop learns of it."""
    channel = connect().channel()
    node = channel.store.node_of("queue0")
    names = [name for n in range(40) if channel.store.node_of(name := f"queue{n}") == node]
    assert len(names) > 2
    for name in names:
        assert channel.basic_get(name) is None
    lease = channel.consumer.lease
    cluster.flush()
    for name in names:
        lease._until[name] = lease.clock() + lease.seconds / 3  # it is time to renew
    lease._shares[node].step()
    for name in names:
        assert [consumer for consumer, _ in channel.store.leases.ends(name)] == [lease.consumer]
    assert lease.outlasted == len(names)
    assert not lease.lost


def test_the_thread_of_a_node_ends_with_its_last_queue(
    connect: Connect, cluster: Cluster, names: list[str], no_keeper: None
) -> None:
    """Else one stays for each node that was ever replaced."""
    channel = connect().channel()
    home, other = map(channel.store.node_of, names[:2])
    here, there = map(cluster.master_of, names[:2])
    for target, left, new in ((there, home, other), (here, other, home)):
        assert channel.basic_get(names[0]) is None
        shares = channel.consumer.lease._shares
        assert [*shares] == [left]
        cluster.move(names[0], target)
        wait_until(
            lambda new=new: (
                channel.basic_get(names[0]) is None and channel.store.node_of(names[0]) == new
            ),
            "the consumer knows that it has moved",
        )
        shares[left].step()
        assert [*shares] == [new]
    shares[home].step()
    assert [*shares] == [home]
    assert not channel.consumer.lease.lost


@pytest.mark.skipif(not hasattr(stock.Channel, "_binding_ttl"), reason="new in Kombu 5.7")
def test_a_binding_that_expires(connect: Connect, cluster: Cluster) -> None:
    short = Queue("short", Exchange("short"), routing_key="short", expires=60)
    short(connect().channel()).declare()
    with cluster.routed() as client:
        assert client.pttl("_kombu.binding.{short}") > 60_000
        assert not client.exists("_kombu.binding_permanent.{short}")
        Queue("long", short.exchange, routing_key="long")(connect().channel()).declare()
        assert client.pttl("_kombu.binding.{short}") == -1


def test_a_queue_that_was_deleted_stays_away(connect: Connect, cluster: Cluster) -> None:
    """Subscribers come and go, and their exchange outlives them."""
    connection, exchange = connect(), Exchange("events", type="topic")
    queue = Queue("gone", exchange, "user.#")(connection.channel())
    queue.declare()
    queue.delete()
    connection.Producer(exchange=exchange).publish("x", routing_key="user.1")
    assert keys_of(cluster) == set()


def test_a_name_without_a_slot_of_its_own(connect: Connect) -> None:
    with pytest.raises(OptionError, match="cannot be named '}q'"):
        publish(connect(), "x", queue=queue_of("}q"))


def test_no_cluster(connect: Connect, server: Server) -> None:
    for port, said in (
        (free_port(), "cannot be connected"),
        (server.port, "Cluster mode is not enabled"),
    ):
        connection = connect(f"rediscluster://127.0.0.1:{port}")
        with pytest.raises(connection.connection_errors, match=said):
            connection.transport.establish_connection()


def test_a_warning_of_a_cluster_that_stops_with_one_node(
    connect: Connect, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    def set_on_all(value: str) -> None:
        for server in cluster.servers:
            with cluster.client(server) as client:
                client.config_set("cluster-require-full-coverage", value)

    set_on_all("yes")
    try:
        connect().channel()
    finally:
        set_on_all("no")
    assert "cluster-require-full-coverage yes" in caplog.text


def test_a_node_is_looked_at_by_who_connects_next(connect: Connect, cluster: Cluster) -> None:
    """This covers nodes that were known before as well as new ones."""
    connection = connect()
    connection.channel()
    with cluster.client(cluster.masters()[2]) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            connection.channel()
            with pytest.raises(ServerError, match="maxmemory-policy is allkeys-lru"):
                connect().channel()
        finally:
            client.config_set("maxmemory-policy", "noeviction")
