"""Faults of a master with replicas and Sentinels."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import RedisError

from tests.crash.pausing import PausingFaults
from tests.crash.schedule import COMMON_SHARES
from tests.kit.sentinels import MASTER, PASSWORD, Group
from tests.kit.servers import Server

#: Fault -> its share. There is no proxy, and what stops the master for long is a failover.
SENTINEL_SHARES = {**COMMON_SHARES, "failover": 14, "planned failover": 8}

#: Longer than the machine makes a healthy master wait. What a master accepts that lives on after a
#: false alarm is lost, unless all replicas have it.
DOWN_AFTER_MS = 2_000
#: While the harness makes the master pause.
PATIENT_MS = 60_000

#: A killed master is started again after so long, as a replica.
DOWN_SECONDS = 2.0


@dataclass
class Master:
    """Whichever server is the master, where the faults expect a server."""

    group: Group

    def client(self, **options: Any) -> redis.Redis:
        return self.group.client()


class Failovers(PausingFaults):
    """Has replicas take over, while all others are well."""

    password = PASSWORD

    def finish(self) -> None:
        super().finish()
        self._group.heal()

    @property
    def servers(self) -> list[Server]:
        return [server for server in self._group.servers if server._process is not None]

    @property
    def paused(self) -> list[Server]:
        return [self._group.master]

    def _can_pause(self) -> bool:
        return self._group.is_whole()

    @property
    def _group(self) -> Group:
        return self.field.server.group  # type: ignore[no-any-return]

    def _before_pause(self) -> None:
        self._set_down_after(PATIENT_MS)

    def _after_pause(self) -> None:
        self._set_down_after(DOWN_AFTER_MS)

    def _set_down_after(self, milliseconds: int) -> None:
        for sentinel in self._group.sentinels:
            with sentinel.client() as client:
                option = "down-after-milliseconds", str(milliseconds)
                client.execute_command("SENTINEL", "SET", MASTER, *option)

    def _failover(self) -> str | None:
        group = self._group
        if self._is_on("outage") or not group.is_whole():
            return None
        old = group.kill_master()
        group.wait_for_failover(old)
        self._at(time.monotonic() + DOWN_SECONDS, old.start)
        return "master"

    def _planned_failover(self) -> str | None:
        group = self._group
        if self._is_on("outage") or not group.is_whole():
            return None
        old = group.master
        with group.sentinels[0].client() as client, contextlib.suppress(RedisError):
            client.execute_command("SENTINEL", "FAILOVER", MASTER)
            group.wait_for_failover(old)
            return "master"
        return None
