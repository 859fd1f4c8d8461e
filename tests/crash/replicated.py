"""Faults of servers with replicas: these take over, and slots of a Cluster move."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from kombu_delayed.store.shard_placement import hash_tag
from kombu_delayed.store.shards import shard_name
from tests.crash.faults import Faults
from tests.crash.reshard import Reshard
from tests.crash.schedule import CLOCKS
from tests.kit import clusters, sentinels
from tests.kit.clusters import Cluster
from tests.kit.servers import Server
from tests.kit.wait import wait_until

QUEUE, SHARDS = "celery", 6

#: Of Sentinel. Longer than the machine makes a healthy master wait: what a master accepts that
#: lives on after a false alarm is lost, unless all replicas have it.
DOWN_AFTER_MS = 2_000
#: While the harness makes the master pause.
PATIENT_MS = 60_000

#: A killed master is started again after so long, as a replica.
GROUP_DOWN_SECONDS, CLUSTER_DOWN_SECONDS = 2.0, 1.0


@dataclass
class Replicated:
    """The whole Cluster, or whichever server is the master, where the harness expects a server."""

    all: Any

    def client(self, **options: Any) -> Any:
        return self.all.routed() if isinstance(self.all, Cluster) else self.all.client()


@dataclass
class PausingFaults(Faults):
    """Nobody reaches a master that closes all connections and then answers nobody.

    There is no proxy, and what stops a master for long is a failover.
    """

    #: What moves with many messages; None: nothing does.
    reshard: Reshard | None = None

    @property
    def paused(self) -> list[Server]:
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        self.all = self.field.server.all

    def _be_patient(self, patient: bool) -> None:
        """Keep others from taking a master for dead that pauses, or let them again."""

    @property
    def servers(self) -> list[Server]:
        return [server for server in self.all.servers if server.running]

    @property
    def _is_well(self) -> bool:
        return not self._is_on("outage") and self.all.is_whole()

    def finish(self) -> None:
        if self._is_on("outage"):
            for server in self.paused:
                with server.client(password=self.password) as client:
                    client.execute_command("CLIENT", "UNPAUSE")
            self._be_patient(False)
        super().finish()
        self._heal()

    def _heal(self) -> None:
        self.all.heal()

    def _can_cut(self) -> bool:
        return not self._is_on(*CLOCKS) and self.all.is_whole()

    def _cut_all(self, seconds: float) -> None:
        self._be_patient(True)
        for server in self.paused:
            with server.client(password=self.password, socket_timeout=5) as client:
                pipe = client.pipeline(transaction=False)
                pipe.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                pipe.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
                pipe.execute_command("CLIENT", "PAUSE", str(round(seconds * 1000)), "ALL")
                pipe.execute()
        self._lasts("outage", seconds, lambda: self._be_patient(False))

    def _clock(self, kind: str, seconds: float) -> str | None:
        # A server that pauses does not tell its time.
        return None if self._is_on("outage") else super()._clock(kind, seconds)


class Failovers(PausingFaults):
    """A master with replicas and Sentinels."""

    password = sentinels.PASSWORD

    @property
    def paused(self) -> list[Server]:
        return [self.all.master]

    def _be_patient(self, patient: bool) -> None:
        option = "down-after-milliseconds", str(PATIENT_MS if patient else DOWN_AFTER_MS)
        if not patient:  # they would take one that they have not heard since for dead at once
            wait_until(self._is_heard, "all Sentinels hear the master again")
        for sentinel in self.all.sentinels:
            with sentinel.client() as client:
                client.execute_command("SENTINEL", "SET", sentinels.MASTER, *option)

    def _is_heard(self) -> bool:
        views = [sentinel.master() for sentinel in self.all.sentinels]
        return all(int(view["last-ok-ping-reply"]) < DOWN_AFTER_MS / 2 for view in views)

    def _failover(self) -> str | None:
        if not self._is_well:
            return None
        old = self.all.kill_master()
        self.all.wait_for_failover(old)
        self._in(GROUP_DOWN_SECONDS, old.start)
        return "master"

    def _planned_failover(self) -> str | None:
        if not self._is_well:
            return None
        old = self.all.master
        with self.all.sentinels[0].client() as client, contextlib.suppress(RedisError):
            client.execute_command("SENTINEL", "FAILOVER", sentinels.MASTER)
            self.all.wait_for_failover(old)
            return "master"
        return None


class ClusterFaults(PausingFaults):
    """Masters of a Cluster die and slots move, under a queue that is spread over all nodes."""

    password = clusters.PASSWORD

    @property
    def paused(self) -> list[Server]:
        return self.all.masters()  # type: ignore[no-any-return]

    def _heal(self) -> None:
        """After a step of their clock nodes may call others failing that are well."""
        with contextlib.suppress(AssertionError):
            super()._heal()

    def _shard(self) -> str:
        return hash_tag(shard_name(QUEUE, self.rng.randrange(SHARDS)))

    def _failover(self) -> str | None:
        """Not while the clock is wrong: by that clock the other masters wait for an answer."""
        shard = self._shard()
        if not self._is_well or self._is_on(*CLOCKS):
            return None
        old = self.all.master_of(shard)
        old.kill()
        if self._is_replaced(shard, old):
            self._in(CLUSTER_DOWN_SECONDS, old.start)
        else:
            old.start()
        return "master"

    def _is_replaced(self, shard: str, old: Server) -> bool:
        """After a step of their clock masters may not notice for as long as it was ahead."""
        try:
            self.all.wait_for_failover(shard, old)
        except AssertionError:
            return False
        return True

    def _planned_failover(self) -> str | None:
        shard = self._shard()
        if not self._is_well:
            return None
        old = self.all.master_of(shard)
        try:
            with self.all.client(self.all.replicas_of(old)[0]) as client:
                client.execute_command("CLUSTER", "FAILOVER")
        except RedisError:  # it still loads its data
            return None
        return "master" if self._is_replaced(shard, old) else None

    def _slot_moved(self) -> str | None:
        return self._moved(self._shard(), self._move)

    def _move(self, key: str, target: Server) -> None:
        try:
            self.all.move(key, target)
        except (RedisError, OSError):
            self.all.finish_move(key, target)

    def _large_slot_moved(self) -> str | None:
        return self._moved(self.reshard.key, self.reshard.move) if self.reshard else None

    def _moved(self, key: str, move: Any) -> str | None:
        if not self._is_well:
            return None
        home = self.all.master_of(key)
        move(key, self.rng.choice([m for m in self.all.masters() if m is not home]))
        return "slot"
