"""Faults of a Cluster: masters die and slots move, under a queue that is spread over all nodes."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from kombu_delayed.shards import shard_name
from kombu_delayed.slots import hash_tag
from tests.crash.faults import SHARES, Faults
from tests.kit.clusters import Cluster

QUEUE, SHARDS = "celery", 6

#: Fault -> its share. What stops a node for long is a failover here, and there is no proxy.
CLUSTER_SHARES = {
    **{kind: SHARES[kind] for kind in ("kill", "kill main", "stop", "term", "quit")},
    **{kind: SHARES[kind] for kind in ("clients killed", "script flush")},
    "failover": 12,
    "slot moved": 12,
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
class ClusterFaults(Faults):
    """Kills a master or moves a slot, while all nodes are well."""

    def finish(self) -> None:
        super().finish()
        self._cluster.heal()

    @property
    def _cluster(self) -> Cluster:
        return self.server.cluster  # type: ignore[attr-defined, no-any-return]

    def _command(self, *command: str) -> str:
        for master in self._cluster.masters():
            with contextlib.suppress(RedisError), self._cluster.client(master) as client:
                client.execute_command(*command)
        return "server"

    def _shard(self) -> str:
        return hash_tag(shard_name(QUEUE, self.rng.randrange(SHARDS)))

    def _failover(self) -> str | None:
        cluster, shard = self._cluster, self._shard()
        if not cluster.is_whole():
            return None
        old = cluster.master_of(shard)
        old.kill()
        cluster.wait_for_failover(shard, old)
        self._at(time.monotonic() + DOWN_SECONDS, old.start)
        return "master"

    def _slot_moved(self) -> str | None:
        cluster, shard = self._cluster, self._shard()
        if not cluster.is_whole():
            return None
        home = cluster.master_of(shard)
        cluster.move(shard, self.rng.choice([m for m in cluster.masters() if m is not home]))
        return "slot"
