"""Faults of a Cluster: masters die and slots move, under a queue that is spread over all nodes."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from kombu_delayed.store.shard_placement import hash_tag
from kombu_delayed.store.shards import shard_name
from tests.crash.pausing import PausingFaults
from tests.crash.reshard import Reshard
from tests.crash.schedule import CLOCK_SHARES, COMMON_SHARES
from tests.kit.clusters import PASSWORD, Cluster
from tests.kit.servers import Server

QUEUE, SHARDS = "celery", 6

#: Fault -> its share. There is no proxy, and what stops a node for long is a failover.
CLUSTER_SHARES = {
    **COMMON_SHARES,
    "failover": 12,
    "planned failover": 8,
    "slot moved": 12,
    "large slot moved": 3,
}

#: A killed master is started again after so long, as a replica.
DOWN_SECONDS = 1.0


@dataclass
class Routed:
    """The whole Cluster, where the harness expects a server."""

    cluster: Cluster

    def client(self, **options: Any) -> Any:
        return self.cluster.routed()


@dataclass
class ClusterFaults(PausingFaults):
    """Kills or replaces a master, or moves a slot, while all nodes are well."""

    #: What moves with many messages; None: nothing does.
    reshard: Reshard | None = None

    password = PASSWORD

    def finish(self) -> None:
        """After a step of their clock nodes may call others failing that are well."""
        super().finish()
        with contextlib.suppress(AssertionError):
            self._cluster.heal()

    @property
    def servers(self) -> list[Server]:
        return [server for server in self._cluster.servers if server._process is not None]

    @property
    def paused(self) -> list[Server]:
        return self._cluster.masters()

    def _can_pause(self) -> bool:
        return self._cluster.is_whole()

    @property
    def _cluster(self) -> Cluster:
        return self.field.server.cluster  # type: ignore[no-any-return]

    @property
    def _is_well(self) -> bool:
        return not self._is_on("outage") and self._cluster.is_whole()

    def _shard(self) -> str:
        return hash_tag(shard_name(QUEUE, self.rng.randrange(SHARDS)))

    def _failover(self) -> str | None:
        """Not while the clock is wrong: by that clock the other masters wait for an answer."""
        cluster, shard = self._cluster, self._shard()
        if not self._is_well or self._is_on(*CLOCK_SHARES):
            return None
        old = cluster.master_of(shard)
        old.kill()
        if self._is_replaced(shard, old):
            self._at(time.monotonic() + DOWN_SECONDS, old.start)
        else:
            old.start()
        return "master"

    def _is_replaced(self, shard: str, old: Server) -> bool:
        """After a step of their clock masters may not notice for as long as it was ahead."""
        try:
            self._cluster.wait_for_failover(shard, old)
        except AssertionError:
            return False
        return True

    def _planned_failover(self) -> str | None:
        cluster, shard = self._cluster, self._shard()
        if not self._is_well:
            return None
        old = cluster.master_of(shard)
        with cluster.client(cluster.replicas_of(old)[0]) as client:
            client.execute_command("CLUSTER", "FAILOVER")
        return "master" if self._is_replaced(shard, old) else None

    def _slot_moved(self) -> str | None:
        return self._moved(self._shard(), self._cluster.move)

    def _large_slot_moved(self) -> str | None:
        if self.reshard is None:
            return None
        return self._moved(self.reshard.key, self.reshard.move)

    def _moved(self, key: str, move: Any) -> str | None:
        cluster = self._cluster
        if not self._is_well:
            return None
        home = cluster.master_of(key)
        move(key, self.rng.choice([m for m in cluster.masters() if m is not home]))
        return "slot"
