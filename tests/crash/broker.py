"""The servers of a run, the ways to them, and what strikes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash import clock
from tests.crash.clock import Clock, steppable
from tests.crash.clock_faults import ClockFaults
from tests.crash.cluster_faults import CLUSTER_SHARES, QUEUE, SHARDS, ClusterFaults, Routed
from tests.crash.crew import SLOTS
from tests.crash.failovers import DOWN_AFTER_MS, SENTINEL_SHARES, Failovers, Master
from tests.crash.network import Network
from tests.crash.schedule import CLOCK_SHARES, SHARES
from tests.crash.single_faults import SingleFaults
from tests.kit.clusters import Cluster, start_cluster
from tests.kit.sentinels import start_group
from tests.kit.servers import start_server
from tests.kit.tasks_app import Settings

KINDS = ("single", "sentinel", "cluster")
LEASE_SECONDS = 2.5

_REPLICATED = {"delayed_replicas_to_wait": 1, "delayed_replica_timeout_seconds": 4}


@dataclass
class Broker:
    """`settings` takes a worker's slot, or None for what sends."""

    server: Any
    settings: Callable[[int | None], Settings]
    safety: str
    faults: type[ClockFaults]
    shares: Mapping[str, int]
    network: Network | None = None
    clock: Clock | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster | None:
        return getattr(self.server, "cluster", None)


@contextlib.contextmanager
def start_broker(kind: str, transport: str, directory: Path) -> Iterator[Broker]:
    """Servers of a kind, for a transport; their clock can be stepped where libfaketime is."""
    journals = directory / "journals"
    journals.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        server_kind, stepped = "valkey", None
        if library := clock.find_library():
            server_kind, stepped = clock.KIND, stack.enter_context(steppable(directory, library))
        broker = _START[kind](stack, server_kind, transport, directory)
        broker.clock = stepped
        if stepped is None:
            broker.shares = {k: n for k, n in broker.shares.items() if k not in CLOCK_SHARES}
        yield broker


def _single(stack: contextlib.ExitStack, kind: str, transport: str, directory: Path) -> Broker:
    config = {"appendfsync": "always", "enable-debug-command": "yes"}
    server = stack.enter_context(
        start_server(kind, directory / "server", port=0, append_only=True, config=config)
    )
    network = stack.enter_context(Network(server.port or 0, len(SLOTS)))

    def settings(slot: int | None) -> Settings:
        port = network.port if slot is None else network.port_of(slot)
        return _settings(transport, f"redis://127.0.0.1:{port}/0", directory)

    return Broker(server, settings, "appendfsync always", SingleFaults, SHARES, network)


def _sentinel(stack: contextlib.ExitStack, kind: str, transport: str, directory: Path) -> Broker:
    group = stack.enter_context(start_group(kind, directory / "group", DOWN_AFTER_MS))
    settings = _settings(transport, group.url, directory, group.options, _REPLICATED)
    safety = "two replicas, delayed_replicas_to_wait 1"
    return Broker(Master(group), lambda slot: settings, safety, Failovers, SENTINEL_SHARES)


def _cluster(stack: contextlib.ExitStack, kind: str, transport: str, directory: Path) -> Broker:
    cluster = stack.enter_context(start_cluster(kind, directory / "cluster"))
    own = {"delayed_shards": {QUEUE: SHARDS}, **_REPLICATED}
    settings = _settings(transport, cluster.url, directory, {}, own)
    safety = "three masters with a replica each, delayed_replicas_to_wait 1"
    return Broker(Routed(cluster), lambda slot: settings, safety, ClusterFaults, CLUSTER_SHARES)


_START = {"single": _single, "sentinel": _sentinel, "cluster": _cluster}


def _settings(
    transport: str,
    url: str,
    directory: Path,
    options: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
) -> Settings:
    """`own` are options that the stock transport does not know."""
    journals = str(directory / "journals")
    if transport == "stock":
        return Settings(url.replace("delayed+", ""), None, dict(options or {}), journals)
    found = {**(options or {}), **(own or {}), "delayed_lease_seconds": LEASE_SECONDS}
    return Settings(f"delayed+{url}", None, found, journals)
