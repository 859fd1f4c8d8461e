"""A queue whose tasks take turns and have limits; some run and many wait."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_ext import Delayed
from celery_ext.policies import Fair, Limit, Policy
from kombu_delayed.store.claimable import Delivered

LEASE_MS = 600_000


def declare(app: Celery, **policies: list[Policy]) -> None:
    """Give queues policies, before anything is sent."""
    app.conf.broker_transport_options = {"delayed_policies": policies}


def mail_policies() -> list[Policy]:
    """Turns of tenants: two at once of each, three in all. Mails to a host have a rate."""
    return [
        Fair(by="tenant", weights={"ada": 3}),
        Limit(concurrency=2, by="tenant"),
        Limit(concurrency=3, critical="urgent", name="all"),
        Limit(rate="60/h", burst=2, by="host"),
    ]


def send(app: Celery, tenant: str, count: int = 1, *, queue: str = "mail", **kwargs: Any) -> None:
    headers = {"tenant": tenant}
    for _ in range(count):
        app.send_task("till.send_mail", [], kwargs, queue=queue, headers=headers)


def claim(
    delayed: Delayed, want: int = 100, queue: str = "mail", tag: int = 1, consumer: str = "w:1:x"
) -> Delivered:
    """Claim as a worker does: messages without capacity wait at the gate from then on."""
    rules = delayed.rules
    assert rules is not None
    given: dict[str, Any] = {
        "gate": rules.gate(queue),
        "declared": delayed.store.policies.read(queue).version,
    }
    found = delayed.store.deliver(queue, consumer, want, tag, lease_ms=LEASE_MS, **given)
    assert found is not None
    return found
