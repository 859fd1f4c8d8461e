"""Faults of servers with replicas: a replica takes over, and slots of a Cluster move."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from kombu_delayed.store.calls.shard_placement import hash_tag
from kombu_delayed.store.calls.shards import shard_name
from tests.crash.faults import Faults, Window
from tests.crash.reshard import Reshard
from tests.crash.schedule import CLOCKS
from tests.kit import clusters, sentinels
from tests.kit.clusters import Cluster
from tests.kit.servers import Server
from tests.kit.wait import wait_until

QUEUE, SHARDS = "celery", 6

#: For Sentinel. Longer than the machine makes a healthy master wait: after a false alarm, writes
#: that this master accepts are lost unless all replicas have them.
DOWN_AFTER_MS = 2_000
#: While the harness makes the master pause.
PATIENT_MS = 60_000

#: A killed master is restarted as a replica after this time.
GROUP_DOWN_SECONDS, CLUSTER_DOWN_SECONDS = 2.0, 1.0

#: How often a move that was given up is retried, and for how long at the end.
FINISH_EVERY_SECONDS, FINISH_SECONDS = 1.0, 180


@dataclass
class Replicated:
    """The whole Cluster, or the current master, in place of a single server."""

    all: Any

    def client(self, **options: Any) -> Any:
        return self.all.routed() if isinstance(self.all, Cluster) else self.all.client()


@dataclass
class PausingFaults(Faults):
    """Pauses a master: it closes all connections and then answers nobody.

    There is no proxy. A longer stop of a master is a failover.
    """

    #: The queue with many messages whose slot moves; None if there is none.
    reshard: Reshard | None = None

    @property
    def paused(self) -> list[Server]:
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        self.all = self.field.server.all

    def _be_patient(self, patient: bool) -> None:
        """Keep others from taking a pausing master for dead, or allow it again."""

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
        if not patient:  # they would declare a master dead at once that has been silent since
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
        self.all.switch()
        return "master"


class ClusterFaults(PausingFaults):
    """Masters of a Cluster die and slots move, under a queue that is spread over all nodes."""

    password = clusters.PASSWORD
    #: A move that the servers gave up: its key and its target. Nothing strikes them meanwhile.
    _half_moved: tuple[str, Server] | None = None

    @property
    def paused(self) -> list[Server]:
        return self.all.masters()  # type: ignore[no-any-return]

    def _heal(self) -> None:
        """After a step of their clock, nodes may report healthy nodes as failing."""
        with contextlib.suppress(AssertionError):
            super()._heal()
        if half := self._half_moved:
            try:
                wait_until(lambda: self.all.finish_move(*half), "the slot is moved", FINISH_SECONDS)
            except AssertionError as error:
                raise AssertionError(f"{error}: {self.all.unfinished}") from error
            self._half_moved = None

    def _shard(self) -> str:
        return hash_tag(shard_name(QUEUE, self.rng.randrange(SHARDS)))

    def _failover(self) -> str | None:
        """Not while the clock is wrong: the other masters use it to wait for an answer."""
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
        """After a step of their clock, masters may notice only after as long as it was ahead."""
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

    @property
    def _is_well(self) -> bool:
        return self._half_moved is None and super()._is_well

    @property
    def owed(self) -> bool:
        return self._half_moved is not None or super().owed

    def _slot_moved(self) -> str | None:
        return self._moved("slot moved", self._shard(), self.all.move)

    def _large_slot_moved(self) -> str | None:
        if self.reshard is None:
            return None
        return self._moved("large slot moved", self.reshard.key, self.reshard.move)

    def _moved(self, kind: str, key: str, move: Any) -> str | None:
        if not self._is_well:
            return None
        home = self.all.master_of(key)
        target = self.rng.choice([m for m in self.all.masters() if m is not home])
        try:
            move(key, target)
        except (RedisError, OSError, AssertionError):
            self._half_moved = key, target
            window = Window(kind, time.time(), float("inf"), "slot")
            self.windows.append(window)
            self._finish_move(window)
        return "slot"

    def _finish_move(self, window: Window) -> None:
        """Retry until it succeeds. Other work continues meanwhile, such as starting a dead node."""
        assert self._half_moved
        if self.all.finish_move(*self._half_moved):
            self._half_moved, window.ended = None, time.time()
        else:
            self._in(FINISH_EVERY_SECONDS, lambda: self._finish_move(window))
