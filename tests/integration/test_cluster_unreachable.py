"""Work that begins while a node is unreachable, or with outdated knowledge, catches up later."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from kombu import Connection, Exchange, Producer, Queue
from redis.cluster import ClusterNode
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, ResponseError

from kombu_delayed.connection.cluster.nodes import Cluster as Map
from kombu_delayed.connection.cluster.nodes import Node, _Rest, named_by
from kombu_delayed.consumer.lease.cluster_lease import Share
from kombu_delayed.errors import NodeDown, ServerNotReady, UrlError
from tests.kit.clusters import PASSWORD, Cluster, free_cluster_port
from tests.kit.inbox import Connect, Inbox
from tests.kit.mail import publish, queue_of
from tests.kit.servers import Server, free_port, start_server
from tests.kit.wait import wait_until


@pytest.fixture
def connect(connect_cluster: Connect) -> Connect:
    """Open connections to the Cluster."""
    return connect_cluster


def cut_off(connection: Connection, server: Server, patch: pytest.MonkeyPatch) -> None:
    """Keep a connection from opening more connections to a server."""
    found: Map = connection.default_channel.cluster
    reach = found.reach

    def reach_others(node: Node, connect: Callable[[], Any], **how: Any) -> Any:
        if node.port == server.port:
            raise NodeDown(f"node {node} is cut off")
        return reach(node, connect, **how)

    patch.setattr(found, "reach", reach_others)


def lead_astray(connection: Connection, key: str) -> None:
    """Make a connection look for a slot at an address without a server."""
    found: Map = connection.default_channel.cluster
    found._looked_at = monotonic()
    slot = key_slot(key.encode())
    found.redirected(MovedError(f"{slot} 127.0.0.1:{free_port()}"), Node("127.0.0.1", 1))
    assert found.node(slot) in found._moved.values()


def test_a_queue_is_bound_when_the_node_is_back(
    connect: Connect, cluster: Cluster, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise messages sent to that exchange would be lost without any error."""
    logs = Exchange(names[0], type="topic")
    errors = Queue(names[1], logs, routing_key="*.error")
    connection, source = connect(), connect()
    logs(source.default_channel).declare()
    with monkeypatch.context() as patch:
        cut_off(connection, cluster.master_of(names[0]), patch)
        inbox = Inbox(connection, errors)
        inbox.drain(0.05)
        assert source.default_channel.get_table(logs.name) == []
    wait_until(
        lambda: inbox.drain(0.05) == [] and source.default_channel.get_table(logs.name), "bound"
    )
    source.Producer().publish("x", exchange=logs, routing_key="disk.error")
    assert inbox.receive(1) == ["x"]


def test_a_queue_that_was_deleted_is_not_bound(
    connect: Connect, cluster: Cluster, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = connect().default_channel
    bound = Queue(names[1], Exchange(names[0], type="topic"), routing_key="#")(channel)
    with monkeypatch.context() as patch:
        cut_off(channel.connection.client, cluster.master_of(names[0]), patch)
        bound.declare()
        with pytest.raises(NodeDown):
            bound.delete()
    assert channel.get_table(names[0]) == []


def test_other_shards_are_consumed(
    connect: Connect, cluster: Cluster, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes consumers that start while the node with the shard count is down."""
    mail = queue_of(names[0])
    spread = {"delayed_shards": {names[0]: 3}}
    source, connection = connect(**spread), connect(**spread)
    home = cluster.master_of(names[0])
    for n in range(30):
        source.Producer().publish(
            n, exchange=mail.exchange, routing_key=names[0], declare=[mail], correlation_id=str(n)
        )
    store = source.default_channel.store
    there = {shard: store.size(shard).ready for shard in store.shards.all(names[0])}
    with monkeypatch.context() as patch:
        cut_off(connection, home, patch)
        inbox = Inbox(connection, mail)
        away = [shard for shard in there if cluster.master_of(shard) != home]
        elsewhere = sum(there[shard] for shard in away)
        assert 0 < elsewhere < 30
        inbox.receive(elsewhere)
    assert sorted(inbox.receive(30, 60)) == [*range(30)]


def test_leases_are_renewed_on_a_node_that_others_leave_alone(
    connect: Connect, cluster: Cluster, names: list[str]
) -> None:
    """Otherwise they would expire there after an outage, while workers wait before they retry."""
    connection = connect()
    inbox = Inbox(connection, Queue(names[0]), ack=False)
    connection.Producer().publish("long", routing_key=names[0], declare=[Queue(names[0])])
    inbox.receive(1)
    channel = connection.default_channel
    found: Map = channel.cluster
    lease, node = channel.consumer.lease, channel.store.node_of(names[0])
    wait_until(lambda: lease._shares[node]._contact.since, "the thread of leases is connected")
    found._resting[node] = _Rest(math.inf, 1.0, "it said nothing")
    assert found.is_down(node)
    Share(lease, node).step()
    assert not found.is_down(node)


def wait_to_learn(connection: Connection, queue: str, server: Server) -> None:
    """Wait until a connection knows from its own commands which server has a queue."""
    store = connection.default_channel.store

    def knows() -> bool:
        with contextlib.suppress(ServerNotReady):
            store.size(queue)
            return bool(store.node_of(queue).port == server.port)
        return False

    wait_until(knows, "it has learnt where the queue is")


def test_a_slot_that_no_node_has(connect: Connect, cluster: Cluster, names: list[str]) -> None:
    """A node that is down for good was forgotten: a new consumer takes the other queues."""
    queues = [queue_of(name) for name in names]
    slot, home = key_slot(names[0].encode()), cluster.master_of(names[0])

    def is_gone() -> bool:  # a node may have learned again of the node that had it
        change_slots(cluster.servers, "DELSLOTS", slot)
        return not any(map(cluster._knows_slots, cluster.servers))

    wait_until(is_gone, "no node has the slot")
    try:
        source = connect()
        inbox = Inbox(connect(), *queues)
        for name in names[1:]:
            source.Producer().publish(name, exchange=name, routing_key=name)
        assert {*inbox.receive(2)} == {*names[1:]}
        with pytest.raises(NodeDown, match=f"no node of the Cluster has slot {slot}"):
            source.Producer().publish("x", exchange="", routing_key=names[0])
    finally:
        change_slots([home], "ADDSLOTS", slot)
        wait_until(cluster.is_covered, "the slot is known to all", 20)
    wait_to_learn(source, names[0], home)
    source.Producer().publish("x", exchange="", routing_key=names[0])
    assert inbox.receive(3)[2] == "x"


def change_slots(servers: list[Server], verb: str, slot: int) -> None:
    for server in servers:
        with server.client(password=PASSWORD) as client, contextlib.suppress(ResponseError):
            client.execute_command(f"CLUSTER {verb}", slot)


def test_a_message_whose_answer_was_lost_is_found_on_the_next_node(
    connect: Connect, cluster: Cluster, names: list[str]
) -> None:
    queue = queue_of(names[0])
    connection, source = connect(), connect()
    channel = connection.default_channel
    bound = queue(channel)
    bound.declare()
    assert bound.get() is None
    publish(source, "x", queue=queue)
    consumer = channel.consumer
    (part,) = consumer.parts
    tag = part.claims.unsure[names[0]] = consumer.session.tag
    name = consumer.lease.consumer
    assert channel.store.deliver(names[0], name, 1, tag + 1, lease_ms=30_000).records
    home = cluster.master_of(names[0])
    other = cluster.master_of(names[1])
    cluster.move(names[0], other)
    try:
        wait_to_learn(connection, names[0], other)
        assert bound.get().payload == "x"
    finally:
        cluster.move(names[0], home)


def test_a_channel_opens_by_a_map_from_before_a_planned_failover(
    connect: Connect, cluster: Cluster, names: list[str]
) -> None:
    """No node is down after it: only the role of the old master shows that the map is old."""
    connection = connect()
    found: Map = connection.default_channel.cluster
    old = Node("127.0.0.1", cluster.replicas_of(cluster.master_of(names[0]))[0].port or 0)
    found._map = found._known()._replace(masters=found._known().masters | {old})
    found._looked_at = -math.inf
    connection.transport.cluster_masters._known.clear()
    connection.channel().close()
    assert old not in found.masters()


def test_who_has_not_heard_of_a_failover_is_not_told_of_it(
    connect: Connect, names: list[str]
) -> None:
    connection = connect()
    lead_astray(connection, names[0])
    assert connection.default_channel.store.size(names[0]) == (0, 0, 0)


@pytest.mark.skipif(not hasattr(Producer, "batch"), reason="Producer.batch() is new in Kombu 5.7")
def test_a_batch_finds_the_next_master(connect: Connect, names: list[str]) -> None:
    """Even a program that sends only batches finds it."""
    from kombu.exceptions import BatchPublishError

    connection = connect()
    connection.default_channel.queue_declare(names[0])
    producer = connection.Producer()
    lead_astray(connection, names[0])

    def sends() -> bool:
        try:
            with producer.batch():
                producer.publish("x", exchange="", routing_key=names[0])
        except (BatchPublishError, *connection.connection_errors):
            return False
        return True

    wait_until(sends, "it is sent")
    assert connection.default_channel.queue_declare(names[0], passive=True).message_count == 1


def test_the_nodes_of_the_url_are_asked_again(connect: Connect, names: list[str]) -> None:
    """The addresses of all nodes may have changed."""
    connection = connect()
    channel = connection.default_channel
    lead_astray(connection, names[0])
    gone = ClusterNode("127.0.0.1", free_port())
    channel.cluster._client.nodes_manager.startup_nodes = {gone.name: gone}

    def counts() -> bool:
        try:
            return channel.store.size(names[0]) == (0, 0, 0)
        except NodeDown:
            return False

    wait_until(counts, "the node is found")
    assert gone.name not in channel.cluster._client.nodes_manager.startup_nodes


def test_who_listens_at_a_node_that_is_taken_out_goes_to_another(
    connect: Connect, cluster: Cluster, names: list[str]
) -> None:
    """The node may keep running on its own, and gets no news of the Cluster."""
    news = Exchange("news", type="fanout")
    new, home = cluster.add_master(), cluster.master_of(names[0])
    both = connect(), connect()
    source, connection = both
    try:
        cluster.move(names[0], new)
        with pytest.MonkeyPatch.context() as patch:
            node = Node("127.0.0.1", new.port)
            patch.setattr(Map, "reach_any", lambda _, connect: connect(node))
            inbox = Inbox(connection, Queue("reader", news))
            inbox.drain(0.05)
            source.Producer().publish("first", exchange=news, declare=[news])
        assert inbox.receive(1) == ["first"]
        for each in both:
            wait_to_learn(each, names[0], new)
        assert connection.default_channel.subclient.connection.port == new.port
    finally:
        cluster.move(names[0], home)
        cluster.remove(new, stop=False)
    try:
        for each in both:
            wait_to_learn(each, names[0], home)
        other = Inbox(connect(), Queue("second reader", news))
        for reader in (other, inbox):
            reader.drain(0.05)
        source.Producer().publish("second", exchange=news, declare=[news])
        assert (inbox.receive(2), other.receive(1)) == (["first", "second"], ["second"])
    finally:
        new.stop()


def test_a_child_is_not_held_up_by_a_thread_of_its_parent(
    connect: Connect, names: list[str]
) -> None:
    """The thread was asking for the slots at the moment of the fork."""
    store = connect().default_channel.store
    asks, ends = threading.Event(), threading.Event()

    def ask() -> None:
        with store.cluster._lock:
            asks.set()
            ends.wait(20)

    thread = threading.Thread(target=ask)
    thread.start()
    asks.wait(5)
    if (child := os.fork()) == 0:
        signal.alarm(10)
        try:
            store.size(names[0])
            store.cluster.look()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    ends.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_node_instead_of_a_server(connect: Connect, cluster: Cluster, names: list[str]) -> None:
    url = f"delayed+redis://:{PASSWORD}@127.0.0.1:{cluster.master_of(names[0]).port}/0"
    with pytest.raises(UrlError, match=r"a node of a Redis Cluster: .* delayed\+rediscluster://"):
        Connection(url).connect()


def test_a_cluster_without_slots(connect: Connect, tmp_path: Path, cluster: Cluster) -> None:
    """Workers may start before the Cluster is created."""
    enabled = {"cluster-enabled": "yes"}
    server = start_server(cluster.kind, tmp_path, port=free_cluster_port(), config=enabled)
    try:
        connection = connect(f"rediscluster://127.0.0.1:{server.port}")
        with pytest.raises(connection.connection_errors, match="has any slots yet"):
            connection.transport.establish_connection()
    finally:
        server.stop()


def test_a_node_without_a_name_is_where_the_one_is_that_names_it() -> None:
    by = Node("10.0.0.1", 7000)
    assert named_by(AskError("5 :7001"), by) == ("10.0.0.1", 7001)
    assert named_by(MovedError("5 10.0.0.2:7001"), by) == ("10.0.0.2", 7001)
