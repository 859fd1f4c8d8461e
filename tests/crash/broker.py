"""The servers of a run, the ways to them, and the faults that strike them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.clock import Clock
from tests.crash.crew import SLOTS
from tests.crash.faults import Faults
from tests.crash.network import Network
from tests.crash.replicated import (
    DOWN_AFTER_MS,
    QUEUE,
    SHARDS,
    ClusterFaults,
    Failovers,
    Replicated,
)
from tests.crash.schedule import CLOCKS, shares
from tests.kit.clock_steps import LIBRARY
from tests.kit.clusters import Cluster, start_cluster
from tests.kit.sentinels import start_group
from tests.kit.servers import start_server
from tests.kit.tasks_app import Settings

LEASE_SECONDS = 2.5

_REPLICATED = {"delayed_replicas_to_wait": 1, "delayed_replica_timeout_seconds": 4}


@dataclass
class Broker:
    """`url` takes a worker's slot, or None for senders. `own`: options of this transport."""

    server: Any
    url: Callable[[int | None], str]
    safety: str
    faults: type[Faults]
    options: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    network: Network | None = None
    more: dict[str, Any] = field(default_factory=dict)

    journals = transport = ""
    clock: Clock | None = None
    shares: Mapping[str, int] = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster | None:
        found = getattr(self.server, "all", None)
        return found if isinstance(found, Cluster) else None

    def settings(self, slot: int | None) -> Settings:
        url = self.url(slot)
        if self.transport == "stock":
            return Settings(url.replace("delayed+", ""), None, self.options, self.journals)
        options = {**self.options, **self.own, "delayed_lease_seconds": LEASE_SECONDS}
        return Settings(f"delayed+{url}", None, options, self.journals)


@contextlib.contextmanager
def start_broker(kind: str, transport: str, directory: Path) -> Iterator[Broker]:
    """Start servers of a kind for a transport. Their clock can be stepped if libfaketime exists."""
    journals = directory / "journals"
    journals.mkdir(parents=True)
    clock = Clock(directory / "clock") if LIBRARY else None
    with contextlib.ExitStack() as stack:
        broker = _START[kind](stack, directory, clock.environment if clock else {})
        broker.journals, broker.transport, broker.clock = str(journals), transport, clock
        broker.shares = {k: n for k, n in shares(kind).items() if clock or k not in CLOCKS}
        yield broker


def _single(stack: contextlib.ExitStack, directory: Path, environment: dict[str, str]) -> Broker:
    config = {"appendfsync": "always", "enable-debug-command": "yes"}
    options: dict[str, Any] = {"append_only": True, "config": config, "environment": environment}
    server = stack.enter_context(start_server("valkey", directory / "server", port=0, **options))
    network = stack.enter_context(contextlib.closing(Network(server.port or 0, len(SLOTS))))
    url = lambda slot: f"redis://127.0.0.1:{network.port(slot)}/0"  # noqa: E731
    return Broker(server, url, "appendfsync always", Faults, network=network)


def _sentinel(stack: contextlib.ExitStack, directory: Path, environment: dict[str, str]) -> Broker:
    started = start_group("valkey", directory / "group", DOWN_AFTER_MS, environment)
    group, safety = stack.enter_context(started), "two replicas, delayed_replicas_to_wait 1"
    url, options = lambda slot: group.url, group.options
    return Broker(Replicated(group), url, safety, Failovers, options, _REPLICATED)


def _cluster(stack: contextlib.ExitStack, directory: Path, environment: dict[str, str]) -> Broker:
    started = start_cluster("valkey", directory / "cluster", environment=environment)
    cluster, own = stack.enter_context(started), {"delayed_shards": {QUEUE: SHARDS}, **_REPLICATED}
    safety = "three masters with a replica each, delayed_replicas_to_wait 1"
    return Broker(Replicated(cluster), lambda slot: cluster.url, safety, ClusterFaults, {}, own)


_START = {"single": _single, "sentinel": _sentinel, "cluster": _cluster}
