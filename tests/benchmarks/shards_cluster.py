"""What it costs a Cluster's nodes that a queue is spread over them, and how evenly it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import redis

from kombu_delayed.connection.cluster.nodes import Cluster, Node
from kombu_delayed.connection.options import Options
from kombu_delayed.store.cluster_store import ClusterStore
from kombu_delayed.store.cluster_store import Nodes as Connections
from tests.benchmarks.fill import store_of
from tests.benchmarks.load import QUEUE, Client, OneNode
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig
from tests.benchmarks.shards import COUNTS, LIMIT, TURNS, measure_on
from tests.kit.clusters import PASSWORD, start_cluster

NODES = 3
SPREAD = 1.10


@dataclass
class ClusterNodes:
    """Three masters without replicas, which keep nothing on disk, as the one node does.

    Nodes of a Cluster talk to one another, however little there is to do. What that takes is
    measured for `idle_seconds` in the beginning, and taken off as the time goes by.
    """

    clients: list[redis.Redis]
    known: Cluster
    partition_size: int
    event_limit: int
    idle_seconds: float
    _count: int = 1
    _connections: list[Connections] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._idle = [0.0] * len(self.clients)
        began, before = time.monotonic(), self.cpu_seconds()
        time.sleep(self.idle_seconds)
        spent = zip(self.cpu_seconds(), before, strict=True)
        seconds = time.monotonic() - began
        self._idle = [(after - since) / seconds for after, since in spent]

    def connect(self) -> Client:
        self._connections.append(Connections(self.known, {"password": PASSWORD}))
        made = ClusterStore(
            self._connections[-1],
            partition_size=self.partition_size,
            event_limit=self.event_limit,
            shards=self._count,
        )
        return lambda shard: made

    def cpu_seconds(self) -> list[float]:
        now = time.monotonic()
        found = [client.info("cpu") for client in self.clients]
        return [
            each["used_cpu_user"] + each["used_cpu_sys"] - idle * now
            for each, idle in zip(found, self._idle, strict=True)
        ]

    def shards(self, count: int) -> Sequence[str]:
        self._count = count
        for client in self.clients:
            client.execute_command("FLUSHALL", "SYNC")
        return self.connect()(QUEUE).shards.all(QUEUE)

    def by_server(self, shards: Sequence[str]) -> Sequence[Sequence[str]]:
        store = self.connect()(QUEUE)
        assert isinstance(store, ClusterStore)
        found: dict[Node, list[str]] = {}
        for shard in shards:
            found.setdefault(store.node_of(shard), []).append(shard)
        return [*found.values()]

    def close(self) -> None:
        while self._connections:
            self._connections.pop().disconnect()


def measure(rig: Rig) -> Figures:
    """The Cluster, and one node beside it."""
    messages, turns = rig.scaled(6_000, 1_000), rig.scaled(TURNS, 1)
    events, size = Options().events, store_of(rig).partition_size
    with ExitStack() as stack:
        cluster = stack.enter_context(
            start_cluster("valkey", rig.directory / "cluster", NODES, 0, append_only=False)
        )
        clients = [stack.enter_context(cluster.client(server)) for server in cluster.masters()]
        places = [("127.0.0.1", server.port or 0) for server in cluster.servers]
        known = Cluster(places, {"password": PASSWORD})
        nodes = ClusterNodes(clients, known, size, events, rig.scaled(10.0, 2.0))
        found = measure_on(nodes, messages, turns)
    alone = measure_on(OneNode(rig, events), messages, turns, (1,))
    return {**found, "alone_us": alone["1_us"]}


def rows(ours: Figures) -> list[Row]:
    most = COUNTS[-1]
    costs = ", ".join(f"{ours[f'{count}_us']:.0f}" for count in COUNTS)
    spreads = ", ".join(f"{ours[f'{count}_spread']:.2f}" for count in COUNTS)
    growth, spread = ours[f"{most}_us"] / ours["1_us"], ours[f"{most}_spread"]
    node = 1e6 / (ours[f"{most}_us"] * spread)
    what = f"one queue with {', '.join(map(str, COUNTS))} shards on a Cluster of {NODES} nodes"
    return [
        Row(
            f"{what}: processor time of all nodes for a message; of one server that is no Cluster",
            f"{most} shards ≤ {LIMIT} × one",  # noqa: RUF001
            NOTHING,
            f"{costs} µs; {ours['alone_us']:.0f} µs",
            f"{growth:.2f}",
            growth <= LIMIT,
        ),
        Row(
            f"{what}: the busiest node's processor time over that of all on average",
            f"{most} shards ≤ {SPREAD:.2f}",
            NOTHING,
            spreads,
            f"{spread:.2f}",
            spread <= SPREAD,
        ),
        Row(
            f"projected from these, where the busiest node has no time left: messages/s of each "
            f"node with {most} shards, of all {NODES}; of one server",
            NOTHING,
            NOTHING,
            f"{node:,.0f}/s, {node * NODES:,.0f}/s; {1e6 / ours['alone_us']:,.0f}/s",
            f"{node * NODES * ours['alone_us'] / 1e6:.2f}",
        ),
    ]


BENCHMARKS = [Benchmark("shards-cluster", measure, rows, sides=("ours",))]
