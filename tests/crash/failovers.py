"""Faults of a master with replicas and Sentinels."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import redis

from tests.crash.faults import SHARES, Faults
from tests.kit.sentinels import Group

#: Fault -> its share. What stops the server for long is a failover here, and there is no proxy.
SENTINEL_SHARES = {
    **{kind: SHARES[kind] for kind in ("kill", "kill main", "stop", "term", "quit")},
    **{kind: SHARES[kind] for kind in ("clients killed", "script flush")},
    "failover": 14,
}

#: Longer than the machine makes a healthy master wait. What a master accepts that lives on after a
#: false alarm is lost, unless all replicas have it.
DOWN_AFTER_MS = 2_000

#: A killed master is started again after so long, as a replica.
DOWN_SECONDS = 2.0


@dataclass
class Master:
    """Whichever server is the master, where the faults expect a server."""

    group: Group

    def client(self, **options: Any) -> redis.Redis:
        return self.group.client()


@dataclass
class Failovers(Faults):
    """Kills the master, while all others are well."""

    def finish(self) -> None:
        super().finish()
        self._group.heal()

    @property
    def _group(self) -> Group:
        return self.server.group  # type: ignore[attr-defined, no-any-return]

    def _failover(self) -> str | None:
        group = self._group
        if not group.is_whole():
            return None
        old = group.kill_master()
        group.wait_for_failover(old)
        self._at(time.monotonic() + DOWN_SECONDS, old.start)
        return "master"
