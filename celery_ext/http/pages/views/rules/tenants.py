"""Two pages: limits and tenants, without reading the whole backlog, and one limit with its keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from glob import escape

from pydantic import BaseModel
from starlette.responses import Response

from celery_ext.control.policies.limits import LimitInfo, limit, limits
from celery_ext.http.api.endpoints.rules.limits import (
    change_limit,
    check_may_change,
    keys_of,
    restore_limit,
    tenants_page,
    usage_of,
    waiting_tasks,
)
from celery_ext.http.api.fields import Cursor, Name
from celery_ext.http.api.limit_models import NewNumbers, TenantsQuery
from celery_ext.http.api.operations import validated
from celery_ext.http.api.status import EVENTS_LIMIT
from celery_ext.http.problems import Problem
from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.inspection import events as streams
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.message.durations import length_text

from ...visit import Action, Form, Shown, View, Visit, asked
from ..results.dead import newest

#: How many delayed tasks of each shard are looked at: those that are due first.
NEXT_SIZE = 1_000

#: How many tenants with counts and how many that wait are shown, and how many queues are read.
SHOWN, WAITING_SHOWN, QUEUES = 100, 50, 50

#: How old the counts may be.
SECONDS = 5.0

VERBS = {"set": "Change", "reset": "Restore"}

#: Keys on the page of a limit.
KEYS = 50


class _Asked(BaseModel):
    queue: Name | None = None
    tenant: Name | None = None
    cursor: Cursor | None = None


@dataclass
class Tenant:
    """The counts of a tenant in what was looked at; times are ms since the epoch."""

    name: str
    next: int = 0
    first_due_ms: int | None = None
    delivered: int = 0
    done: int = 0
    dead: int = 0
    queues: set[str] = field(default_factory=set)

    @property
    def weight(self) -> int:
        """How many tasks of it were seen."""
        return self.next + self.delivered + self.dead


class _Counts(dict[str, Tenant]):
    def __missing__(self, name: str) -> Tenant:
        return self.setdefault(name, Tenant(name))


def look(visit: Visit) -> Shown:
    query = asked(visit, _Asked)
    names = visit.chosen_queues(query.queue)[:QUEUES]
    delayed = visit.service.delayed
    search = {
        "queue": query.queue,
        "tenant": f"*{escape(query.tenant)}*" if query.tenant else None,
        "limit": WAITING_SHOWN,
        "cursor": query.cursor,
    }
    waiting, following, is_complete = tenants_page(visit, validated(TenantsQuery, search))
    key = ("tenants", query.queue, visit.identity.tenants, visit.identity.queues)
    found = visit.service.cache.get(key, SECONDS, lambda: _read(visit, names))
    shown = [each for each in found if (query.tenant or "") in each.name]
    return {
        "filter": {"queue": query.queue, "tenant": query.tenant},
        "cursor": query.cursor,
        "limits": [info for name in names for info in limits(delayed, usage_of(visit, name))],
        "waiting": waiting,
        "next": following,
        "is_complete": is_complete,
        "tenants": shown[:SHOWN],
        "tenant_count": len(shown),
        "next_size": NEXT_SIZE,
        "events_size": EVENTS_LIMIT,
        "queues": visit.queues(),
        "queue_limit": QUEUES if query.queue is None and len(visit.queues()) > QUEUES else 0,
        "words_of": words_of,
    }


def words_of(info: LimitInfo) -> str:
    parts = [f"{info.capacity:,} at once"] if info.capacity is not None else []
    if info.rate:
        burst = f", up to {info.burst:,} in a row" if (info.burst or 1) > 1 else ""
        parts.append(info.rate + burst)
    text = " and ".join(parts) or ("counted only" if info.declared else "unknown to this server")
    if info.by:
        text += f", shared by {info.by}" if info.shares else f" of each {info.by}"
    if info.after_seconds is not None:
        text += f" of what is {length_text(info.after_seconds)} late"
    if info.overridden:
        text += f" (set by {info.set_by})"
    return text + ("; critical tasks pass" if info.critical else "")


def _read(visit: Visit, names: list[str]) -> list[Tenant]:
    store, counts = visit.service.delayed.store, _Counts()
    shards = [shard for name in names for shard in store.shards.all(name)]
    for shard in shards:
        page = Backlog(store, shard).page(size=NEXT_SIZE).waiting
        for waiting in page:
            _count_next(counts, TaskInfo.waiting(shard, waiting))
        for event in streams.newest(store, shard, EVENTS_LIMIT):
            if event.tenant:
                counts[event.tenant].queues.add(event.queue)
                counts[event.tenant].delivered += event.event == "delivered"
                counts[event.tenant].done += event.event == "acked"
    for task in newest(visit, shards):
        if tenant := task.info.tenant:
            counts[tenant].queues.add(task.queue)
            counts[tenant].dead += 1
    bound = visit.identity.tenants
    mine = [each for each in counts.values() if not bound or each.name in bound]
    return sorted(mine, key=lambda each: (-each.weight, each.name))


def _count_next(counts: _Counts, info: TaskInfo) -> None:
    if not info.tenant:
        return
    found = counts[info.tenant]
    found.queues.add(info.queue)
    found.next += 1
    if found.first_due_ms is None or (info.due_ms or 0) < found.first_due_ms:
        found.first_due_ms = info.due_ms


class _AskedLimit(BaseModel):
    queue: Name
    name: Name
    key: Name | None = None
    cursor: Cursor | None = None


def look_at_limit(visit: Visit) -> Shown:
    """One limit: its keys, and the tasks that wait for it."""
    query = asked(visit, _AskedLimit)
    visit.identity.check_queue(query.queue)
    delayed, usage = visit.service.delayed, usage_of(visit, query.queue)
    shown = {"filter": query.model_dump(), "words_of": words_of}
    info = limit(delayed, usage, query.name)
    if info is None:
        return {**shown, "limit": None, "status": 404}
    page, following = keys_of(visit, usage, info, query, KEYS)
    return {
        **shown,
        "limit": info,
        "page": info.shares or page,
        "next": following,
        "tasks": waiting_tasks(visit, usage, query.name),
        "may_change": _may_change(visit, info),
    }


def _may_change(visit: Visit, info: LimitInfo) -> bool:
    if not visit.identity.has("admin") or info.kind not in ("limit", "drain"):
        return False
    try:
        check_may_change(visit.identity, info.queue, info.name)
    except Problem:
        return False
    return True


def on_limit(visit: Visit, form: Form) -> Response:
    """Change a limit, or restore its declared numbers, as a form requests."""
    verb, queue, name = form.verb(VERBS), form.one("queue"), form.one("name")
    if verb == "reset":
        restore_limit(visit, queue, name)
    else:
        counts = form.given(["concurrency", "burst"]).items()
        numbers = {of: int(text) if text.isdecimal() else text for of, text in counts}
        given = {**form.given(["rate", "why", "for"]), **numbers}
        change_limit(visit, queue, name, validated(NewNumbers, given))
    return visit.redirect("/limit", queue=queue, name=name)


VIEWS = [
    View("tenants", "/tenants", "Tenants", look, seconds=2),
    View("limit", "/limit", "", look_at_limit, seconds=2),
]
ACTIONS = [Action("/limit/change", on_limit, "admin")]
