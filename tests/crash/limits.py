"""The limits of the load, and how much its tasks take of them."""

from __future__ import annotations

import random
from inspect import signature
from typing import Any

#: The queue whose tenants have turns, and the one whose slots are divided among regions.
TURNS, REGIONS = "turns", "regions"
#: Two that share the slots of one provider, which the previous version cannot do.
CALLS, MAILS = "calls", "mails"
QUEUES = (TURNS, REGIONS, CALLS, MAILS)
NEW_QUEUES = (CALLS, MAILS)
PROVIDER = "provider"

#: Limit -> how much of it may be in use at once; for `customer`, how much of each key.
SLOTS = {
    "turns": 8,
    "customer": 2,
    "regions": 6,
    "east": 3,
    "north": 2,
    "others": 1,
    PROVIDER: 3,
}

#: The seconds between two tasks that begin in TURNS, and how many begin at once after a pause.
PACE_SECONDS, PACE_BURST = 0.05, 4

#: The limits that a task takes, and how much of each.
Uses = tuple[tuple[str, int], ...]


def policies() -> dict[str, list[Any]]:
    """The policies, in the form of the transport option `delayed_policies`."""
    from celery_ext.policies import Fair, Limit, Shares

    rate = f"{round(1 / PACE_SECONDS)}/s"
    turns = [
        Fair(by="tenant", weights={"ada": 3}),
        Limit(concurrency=SLOTS["turns"], weight="weight"),
        Limit(concurrency=SLOTS["customer"], by="customer"),
        Limit(rate=rate, burst=PACE_BURST, name="pace"),
    ]
    shares = {region: SLOTS[region] / SLOTS["regions"] for region in ("east", "north")}
    found = {TURNS: turns, REGIONS: [Shares(SLOTS["regions"], shares, by="region", borrow=False)]}
    if "scope" not in signature(Limit).parameters:  # the previous version
        return found
    provider = Limit(concurrency=SLOTS[PROVIDER], name=PROVIDER, scope="global")
    return {**found, CALLS: [provider], MAILS: [Fair(), provider]}


def draw(rng: random.Random) -> tuple[str, dict[str, Any], dict[str, Any], Uses]:
    """The queue, keyword arguments and headers of a task, and the limits that it takes."""
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(NEW_QUEUES), {}, {}, ((PROVIDER, 1),)
    if kind < 0.5:
        region = rng.choice(["east", "north", "south"])
        share = region if region in SLOTS else "others"
        return REGIONS, {"region": region}, {}, (("regions", 1), (share, 1))
    customer, weight = f"c{rng.randrange(4)}", rng.choice([1, 1, 2, 3])
    headers = {"tenant": rng.choice(["ada", "bea", "cem"])}
    uses = (("turns", weight), (f"customer {customer}", 1))
    return TURNS, {"customer": customer, "weight": weight}, headers, uses


def slots(limit: str) -> int:
    """How much of a limit may be in use at once."""
    return SLOTS[limit.partition(" ")[0]]
