"""The server cost of spreading a queue over shards, and how evenly it is spread.

Stores act as producers and consumers, on servers whose processor time is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import redis

from kombu_delayed.connection.cluster.connection import Nodes as Connections
from kombu_delayed.connection.cluster.nodes import Cluster, Node
from kombu_delayed.connection.options import Options
from kombu_delayed.store.store import Entry, Store
from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import Rig, cpu_seconds, store_of
from tests.kit.clusters import PASSWORD, start_cluster
from tests.kit.state import message

QUEUE = "load"

#: As many as a worker with two slots claims at once.
CLAIM = 8
CLIENTS = 16
LEASE_MS = 3_600_000
BEGIN_MS = 1_000

COUNTS = (1, 2, 3, 6, 12)
MOST = COUNTS[-1]
LIMIT, SPREAD = 1.15, 1.10
TURNS = 5
NODES = 3
TEXT = message("x" * 900)


@dataclass
class OneNode:
    """All shards on one server. Stores use the time in `now`."""

    clients: list[redis.Redis]
    new: Callable[[], Any]
    options: dict[str, Any]
    open: list[Any] = field(default_factory=list)

    def connect(self) -> Any:
        self.open.append(Store(self.new(), **self.options))
        return self.open[-1]

    def cpu_seconds(self) -> list[float]:
        return [*map(cpu_seconds, self.clients)]

    def shards(self, count: int) -> Sequence[str]:
        """Spread the queue anew, over this many shards."""
        self.options["shards"] = count
        for client in self.clients:
            # Another thread would free the memory later, which would count as work on messages.
            client.execute_command("FLUSHALL", "SYNC")
        return self.connect().shards.all(QUEUE)

    def by_server(self, shards: Sequence[str]) -> Sequence[Sequence[str]]:
        return [shards]

    def close(self) -> None:
        while self.open:
            self.open.pop().hang_up()


@dataclass
class ClusterNodes(OneNode):
    """Masters without replicas, which keep nothing on disk, as the one node does.

    Nodes of a Cluster talk to one another even when they have nothing to do. That cost is
    measured for `idle_seconds` in the beginning, and subtracted from later readings.
    """

    idle_seconds: float = 0

    def __post_init__(self) -> None:
        self._idle = [0.0] * len(self.clients)
        began, before = time.monotonic(), self.cpu_seconds()
        time.sleep(self.idle_seconds)
        spent = zip(self.cpu_seconds(), before, strict=True)
        seconds = time.monotonic() - began
        self._idle = [(after - since) / seconds for after, since in spent]

    def cpu_seconds(self) -> list[float]:
        now = time.monotonic()
        found = zip(super().cpu_seconds(), self._idle, strict=True)
        return [used - idle * now for used, idle in found]

    def by_server(self, shards: Sequence[str]) -> Sequence[Sequence[str]]:
        store, found = self.connect(), dict[Node, list[str]]()
        for shard in shards:
            found.setdefault(store.node_of(shard), []).append(shard)
        return [*found.values()]


def one_node(rig: Rig, events: int) -> OneNode:
    options = {"partition_size": store_of(rig).partition_size, "event_limit": events}
    return OneNode([rig.redis], rig.server.client, options)


def server_us(nodes: OneNode, shards: Sequence[str], count: int, text: str = TEXT) -> list[float]:
    """Messages, one due each millisecond, are sent one by one and claimed as they become due.

    Returns µs of each server for one message. The servers take turns with their shares: on one
    machine, each would otherwise find the processor's caches full of the others' data.
    """
    stores = [nodes.connect() for _ in range(CLIENTS)]
    before = nodes.cpu_seconds()
    for some in nodes.by_server(shards):
        step_ms = CLAIM * len(shards) / len(some)  # as often as if all took turns
        _consume(stores, some, _produce(stores, some, count, text), step_ms)
    spent = zip(nodes.cpu_seconds(), before, strict=True)
    nodes.close()
    return [(after - began) / count * 1e6 for after, began in spent]


def _produce(stores: Sequence[Store], shards: Sequence[str], count: int, text: str) -> int:
    """Send the messages of some of the shards; returns how many there were."""
    sent = 0
    for n in range(count):
        id, store = f"{n:08}-1111-4222-8333-444444444444", stores[n % CLIENTS]
        store.now = str(BEGIN_MS)
        shard = store.shards.home(QUEUE, id)
        if shard in shards:
            due_ms = BEGIN_MS + 1 + n * 7_919 % count
            store.schedule(shard, [Entry(id, 0, text, str(due_ms))])
            sent += 1
    return sent


def _consume(stores: Sequence[Store], shards: Sequence[str], count: int, step_ms: float) -> None:
    left, claims, leased = count, 0, set[tuple[int, str]]()
    while left:
        number, shard = claims % CLIENTS, shards[claims % len(shards)]
        claims += 1
        if claims > count + 100 * len(shards):
            raise RuntimeError(f"{left} of {count} messages were not delivered")
        stores[number].now = str(BEGIN_MS + round(claims * step_ms))
        left -= _claim(stores[number], shard, number, claims, (number, shard) in leased)
        leased.add((number, shard))
    for store in stores:
        store.run.settle()


def _claim(store: Store, shard: str, number: int, claims: int, leased: bool) -> int:
    """Act like a consumer woken by a token: take it, claim, ack."""
    store.run("ZPOPMIN", store.keys(shard).wake)
    tag, consumer = claims * CLAIM, f"box:{number}:load"
    found = store.deliver(shard, consumer, CLAIM, tag, lease_ms=LEASE_MS, leased=leased)
    if found is None:
        raise RuntimeError(f"{consumer} has lost its lease on {shard!r}")
    if count := len(found.records):
        store.ack(shard, consumer, range(tag, tag + count), _refused)
    return count


def _refused() -> None:
    raise RuntimeError("an ack was refused")


def measure_on(nodes: OneNode, rig: Rig, counts: Sequence[int] = COUNTS) -> Figures:
    """The sides take turns, so that other load on the machine hits all.

    Returns the processor time of all nodes for a message, and the most of one over the mean.
    """
    messages = rig.scaled(6_000, 1_000)
    spent: dict[int, list[list[float]]] = {count: [] for count in counts}
    for _ in range(rig.scaled(TURNS, 1)):
        for count, found in spent.items():
            found.append(server_us(nodes, nodes.shards(count), messages))
    figures: Figures = {}
    for count, found in spent.items():
        figures[f"{count}_us"] = median(map(sum, found))
        figures[f"{count}_spread"] = median(max(each) / mean(each) for each in found)
    return figures


def _each(figure: str) -> str:
    return ", ".join(f"{{{count}_{figure}}}" for count in COUNTS)


COSTS, SPREADS = _each("us:.0f"), _each("spread:.2f")


def _grows_little(f: Figures) -> bool:
    return f[f"{MOST}_us"] / f["1_us"] <= LIMIT


@benchmark(
    "shards",
    Line(
        f"one queue with {', '.join(map(str, COUNTS))} shards on one server: processor time of "
        "the server for a message",
        f"{COSTS} µs",
        f"{MOST} shards ≤ {LIMIT} × one",  # noqa: RUF001
        (f"{MOST}_us", "1_us"),
        _grows_little,
    ),
)
def shards(rig: Rig) -> Figures:
    return measure_on(one_node(rig, Options().events), rig)


WHAT = f"one queue with {', '.join(map(str, COUNTS))} shards on a Cluster of {NODES} nodes"


def _projected(f: Figures) -> float:
    """Messages/s of a node when the busiest one has no time left."""
    return 1e6 / (f[f"{MOST}_us"] * f[f"{MOST}_spread"])


@benchmark(
    "shards-cluster",
    Line(
        f"{WHAT}: processor time of all nodes for a message; of one server that is no Cluster",
        f"{COSTS} µs; {{alone_us:.0f}} µs",
        f"{MOST} shards ≤ {LIMIT} × one",  # noqa: RUF001
        (f"{MOST}_us", "1_us"),
        _grows_little,
    ),
    Line(
        f"{WHAT}: the busiest node's processor time over that of all on average",
        SPREADS,
        f"{MOST} shards ≤ {SPREAD:.2f}",
        f"{{{MOST}_spread:.2f}}",
        lambda f: f[f"{MOST}_spread"] <= SPREAD,
    ),
    Line(
        "projected from these, where the busiest node has no time left: messages/s of each node "
        f"with {MOST} shards, of all {NODES}; of one server",
        lambda f: (
            f"{_projected(f):,.0f}/s, {_projected(f) * NODES:,.0f}/s; {1e6 / f['alone_us']:,.0f}/s"
        ),
        ratio=lambda f: f"{_projected(f) * NODES * f['alone_us'] / 1e6:.2f}",
    ),
)
def shards_cluster(rig: Rig) -> Figures:
    """The Cluster, and one node beside it."""
    alone = one_node(rig, Options().events)
    with ExitStack() as stack:
        directory = rig.directory / "cluster"
        cluster = stack.enter_context(
            start_cluster("valkey", directory, NODES, 0, append_only=False)
        )
        clients = [stack.enter_context(cluster.client(server)) for server in cluster.masters()]
        places = [("127.0.0.1", server.port or 0) for server in cluster.servers]
        known = Cluster(places, {"password": PASSWORD})
        new = lambda: Connections(known, {"password": PASSWORD})  # noqa: E731
        nodes = ClusterNodes(clients, new, {**alone.options}, [], rig.scaled(10.0, 2.0))
        found = measure_on(nodes, rig)
    return {**found, "alone_us": measure_on(alone, rig, (1,))["1_us"]}
