"""The kinds of faults, and the seeded schedule by which they strike."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import NamedTuple

#: The kinds of servers, in the order of the shares below.
SERVERS = "single", "sentinel", "cluster"


class Fault(NamedTuple):
    """`shares`: on each kind of server; one number applies to all. Its traits are some of these.

    lasting:
        It ends later than it strikes.
    trying:
        The previous version does not stand it, and is spared.
    short:
        It is short, and no worker loses its lease.
    away:
        The server receives no acks meanwhile.
    gentle:
        It ends no worker. Nor does one that is "replacing" a process of a pool or "breaking"
        connections. Some of these precede each calm.
    """

    meaning: str
    shares: int | tuple[int, int, int]
    traits: str = ""

    def share(self, server: str) -> int:
        return self.shares if isinstance(self.shares, int) else self.shares[SERVERS.index(server)]


FAULTS = {
    "kill": Fault("SIGKILL of a worker and its pool", 24),
    "kill main": Fault("SIGKILL of a prefork worker's main process alone", 10),
    "stop": Fault("SIGSTOP for longer than the lease, then SIGCONT", 8, "lasting"),
    "term": Fault("SIGTERM of a worker (warm shutdown)", 10),
    "quit": Fault("SIGQUIT of a worker (cold shutdown)", 6),
    "redeploy": Fault("half of the workers go to the previous version, and back", 3, "lasting"),
    "policyless": Fault("a worker that does not know the policies", 2, "lasting"),
    "queue paused": Fault("a queue is paused and resumed", 3, "lasting trying"),
    "tenant paused": Fault("a tenant is paused and resumed", 3, "lasting trying"),
    "limit lowered": Fault("a limit is lowered and reset", 3, "lasting trying"),
    "time limit": Fault("a hard time limit ends a process of a pool", 8, "trying replacing"),
    "terminate": Fault("`revoke(terminate=True)` ends a process of a pool", 8, "trying replacing"),
    "autoscale": Fault("tasks at once make a pool grow, and it shrinks", 5, "trying replacing"),
    "no yield": Fault("a greenlet does not yield for longer than the lease", 6, "trying gentle"),
    "clock minute": Fault(
        "the server's clock steps by +60, -120 and +60 s", 3, "lasting trying gentle"
    ),
    "clock hour": Fault("the server's clock steps by +1, -2 and +1 h", 3, "lasting trying gentle"),
    "server kill": Fault("SIGKILL and restart of the server", (8, 0, 0), "short away"),
    "clients killed": Fault("CLIENT KILL TYPE normal", 10, "short away breaking"),
    "script flush": Fault("SCRIPT FLUSH", 5, "short gentle"),
    "server sleep": Fault("DEBUG SLEEP, 0.3 to 1.2 s", (5, 0, 0), "short away"),
    "pause": Fault("network stands still, 0.3 to 1.2 s", (5, 0, 0), "lasting short away"),
    "cut": Fault("network cut, 0.3 to 1.2 s", (9, 0, 0), "lasting short away"),
    "outage": Fault(
        "nobody reaches the server for 1.5 to 3 leases", 6, "lasting trying away breaking"
    ),
    "outage of one": Fault(
        "one worker does not reach the server for 1.5 to 3 leases",
        (6, 0, 0),
        "lasting trying breaking",
    ),
    "failover": Fault("SIGKILL of the master, a replica takes over", (0, 14, 12), "short away"),
    "planned failover": Fault(
        "a replica takes over while the master is well", (0, 8, 8), "trying short away breaking"
    ),
    "slot moved": Fault("the slot of a shard moves to another master", (0, 0, 12), "short away"),
    "large slot moved": Fault(
        "a slot with many messages moves to another master", (0, 0, 3), "trying short away"
    ),
}

FIRST_AT_SECONDS = 2.0
STORM_SECONDS = 24.0
CALM_SECONDS = 24.0
#: The last part of each calm, in which little is sent.
QUIET_SECONDS = 12.0


def kinds(trait: str) -> frozenset[str]:
    """The kinds of faults with a trait."""
    return frozenset(kind for kind, fault in FAULTS.items() if trait in fault.traits.split())


#: The actions of an operator of this transport.
OPERATED = frozenset({"queue paused", "tenant paused", "limit lowered"})

LASTING, TRYING, SHORT, AWAY = map(kinds, ("lasting", "trying", "short", "away"))
CLOCKS = frozenset({"clock minute", "clock hour"})


def shares(server: str) -> dict[str, int]:
    """How often each fault strikes a kind of server, relative to the others."""
    return {kind: share for kind, fault in FAULTS.items() if (share := fault.share(server))}


def schedule(
    seed: int, seconds: float, interval_seconds: float, shares: Mapping[str, int]
) -> list[tuple[float, str]]:
    """Each fault and when it strikes, in seconds from the start.

    Storms and calms take turns. The first storm has each kind once, with any seed.
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
    """One fault that replaces, one that breaks and any one of all, in any order."""
    replacing, breaking, others = (
        sorted(kinds(trait) & {*shares}) for trait in ("replacing", "breaking", "gentle")
    )
    found = [rng.choice(each) for each in (replacing, breaking, replacing + breaking + others)]
    return rng.sample(found, len(found))
