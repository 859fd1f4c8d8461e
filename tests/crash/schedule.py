"""The kinds of faults, and the seeded schedule by which they strike."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

#: Fault -> its share.
WORKER_SHARES = {"kill": 24, "kill main": 10, "stop": 8, "term": 10, "quit": 6, "redeploy": 3}
POOL_SHARES = {"time limit": 8, "terminate": 8, "autoscale": 5, "no yield": 6}
CLOCK_SHARES = {"clock minute": 3, "clock hour": 3}
#: What strikes every kind of server.
COMMON_SHARES = {
    **WORKER_SHARES,
    **POOL_SHARES,
    **CLOCK_SHARES,
    "clients killed": 10,
    "script flush": 5,
    "outage": 6,
}
SHARES = {
    **COMMON_SHARES,
    "outage of one": 6,
    "server kill": 8,
    "server sleep": 5,
    "pause": 5,
    "cut": 9,
}

MEANINGS = {
    "kill": "SIGKILL of a worker and its pool",
    "kill main": "SIGKILL of a prefork worker's main process alone",
    "stop": "SIGSTOP for longer than the lease, then SIGCONT",
    "term": "SIGTERM of a worker (warm shutdown)",
    "quit": "SIGQUIT of a worker (cold shutdown)",
    "redeploy": "half of the workers go to the previous version, and back",
    "policyless": "a worker that does not know the policies",
    "time limit": "a hard time limit ends a process of a pool",
    "terminate": "`revoke(terminate=True)` ends a process of a pool",
    "autoscale": "tasks at once make a pool grow, and it shrinks",
    "no yield": "a greenlet does not yield for longer than the lease",
    "clock minute": "the server's clock steps by +60, -120 and +60 s",
    "clock hour": "the server's clock steps by +1, -2 and +1 h",
    "server kill": "SIGKILL and restart of the server",
    "clients killed": "CLIENT KILL TYPE normal",
    "script flush": "SCRIPT FLUSH",
    "server sleep": "DEBUG SLEEP, 0.3 to 1.2 s",
    "pause": "network stands still, 0.3 to 1.2 s",
    "cut": "network cut, 0.3 to 1.2 s",
    "outage": "nobody reaches the server for 1.5 to 3 leases",
    "outage of one": "one worker does not reach the server for 1.5 to 3 leases",
    "failover": "SIGKILL of the master, a replica takes over",
    "planned failover": "a replica takes over while the master is well",
    "slot moved": "the slot of a shard moves to another master",
    "large slot moved": "a slot with many messages moves to another master",
}

#: What ends no worker: some of it precedes each calm. First what replaces a process of a pool, then
#: what breaks connections, then the rest.
REPLACING = ("time limit", "terminate", "autoscale")
BREAKING = ("clients killed", "outage", "outage of one", "planned failover")
GENTLE = (*REPLACING, *BREAKING, *CLOCK_SHARES, "no yield", "script flush")

#: What the previous version does not stand: it is spared that.
TRYING = frozenset(
    {"time limit", "terminate", "autoscale", "no yield", *CLOCK_SHARES}
    | {"outage", "outage of one", "planned failover", "large slot moved"}
)

FIRST_AT_SECONDS = 2.0
STORM_SECONDS = 24.0
CALM_SECONDS = 24.0
#: The last part of each calm, in which little is sent.
QUIET_SECONDS = 12.0


def schedule(
    seed: int, seconds: float, interval_seconds: float, shares: Mapping[str, int] = SHARES
) -> list[tuple[float, str]]:
    """When which fault strikes, in seconds from the start.

    Storms and calms take turns. The first storm has each kind once, whatever the seed.
    """
    rng = random.Random(seed)
    plan: list[tuple[float, str]] = []
    storm = rng.sample(list(shares), len(shares))
    at = FIRST_AT_SECONDS
    while at < seconds:
        for kind in [*storm, *_gentle(rng, shares)]:
            plan.append((at, kind))
            at += interval_seconds * rng.uniform(0.4, 1.6)
        at += CALM_SECONDS
        count = max(round(STORM_SECONDS / interval_seconds), 1)
        storm = rng.choices(list(shares), list(shares.values()), k=count)
    return [(at, kind) for at, kind in plan if at < seconds]


def _gentle(rng: random.Random, shares: Collection[str]) -> list[str]:
    """One that replaces, one that breaks and any one, in any order."""
    kinds = [
        rng.choice([kind for kind in group if kind in shares])
        for group in (REPLACING, BREAKING, GENTLE)
    ]
    return rng.sample(kinds, len(kinds))
