"""Tenants that wait at the gates of queues, or have slots there."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

from celery_ext.control.policies.limit_usage import GateUsage
from celery_ext.control.policies.limits import TenantInfo, gate_usage, tenants
from celery_ext.tasks.times import info_data
from kombu_delayed.inspection.backlog import NEVER_MS
from kombu_delayed.inspection.gate_usage import known_as

from ... import cursors
from ...limit_models import OneTenant, Tenants, TenantsQuery
from ...operations import Call, Operations
from .limits import usage_of

#: How many messages wait (negative, so that the busiest tenants are first), tenant, queue.
Place = tuple[int, str, str]

operations = Operations("limits", "/v1/tenants")


@operations.add("GET", "", "read", Tenants, query=TenantsQuery)
def list_tenants(call: Call) -> dict[str, Any]:
    """Tenants that wait for their turn or for limits, the busiest first."""
    found, following, is_complete = tenants_page(call, call.query)
    return {
        "tenants": [info_data(each) for each in found],
        "is_complete": is_complete,
        "next": following,
    }


def tenants_page(call: Call, query: TenantsQuery) -> tuple[list[TenantInfo], str | None, bool]:
    """A page of tenants, the next cursor (None: no more), and whether all messages were read."""
    place: Place = -NEVER_MS, "", ""
    if query.cursor:
        waiting, name, queue = cursors.read(query.cursor, int, str, str)
        place = waiting, name, queue
    names = call.service.queues(call.identity, query.queue)
    usages = {name: usage_of(call, name) for name in names}
    each = heapq.merge(*(_behind(usage, place) for usage in usages.values()))
    meant = (at for at in each if query.tenant is None or fnmatchcase(at[1], query.tenant))
    first = [*islice(meant, query.limit + 1)]
    shown = first[: query.limit]
    infos = {
        (info.tenant, queue): info
        for queue, usage in usages.items()
        for info in tenants(
            call.service.delayed, usage, [name for _, name, its in shown if its == queue]
        )
    }
    return (
        [infos[name, queue] for _, name, queue in shown],
        cursors.write(*shown[-1]) if len(first) > len(shown) else None,
        all(usage.is_complete for usage in usages.values()),
    )


def _behind(usage: GateUsage, place: Place) -> Iterator[Place]:
    order = usage.busiest
    start = bisect_left(order, place[:2])
    each = ((waiting, name, usage.queue) for waiting, name in islice(order, start, None))
    return (at for at in each if at > place)


@operations.add("GET", "/{tenant}", "read", OneTenant)
def get_tenant(call: Call) -> dict[str, Any]:
    """The waiting tasks of a tenant in each queue, and the reasons."""
    name = call.named("tenant")
    call.identity.check_tenant(name)
    delayed, found = call.service.delayed, []
    for queue in call.service.queues(call.identity):
        usage = gate_usage(delayed, queue, [name])
        if known_as(name) in usage.tenants:
            found += tenants(delayed, usage, [known_as(name)])
    return {
        "tenant": name,
        "waiting": sum(each.waiting for each in found),
        "queues": [info_data(each) for each in found],
    }
