"""Limits and tenants, as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from celery_ext.control.policies.limits import UseInfo, WaitInfo

from .fields import Cursor, Given, Lasting, Name
from .models import OneQueue, TaskState


class KeyState(BaseModel):
    """A key of a limit; null: it is not counted, or the caller may not see it."""

    key: str
    in_use: int | None
    waiting: int
    first_due: str | None = Field(description="When the first waiting message was due.")
    tokens: float | None = Field(None, description="Tasks that may start now under its rate.")
    slots: int | None = Field(None, description="The slots of a share.")


class LimitState(BaseModel):
    """A limit of a queue, over all its keys."""

    queue: str
    name: str
    kind: Literal["limit", "drain", "shares", "throttler", "undeclared"]
    task: str | None = Field(description="The task that declares it; null: the queue does.")
    by: str | None = Field(description="Where its keys are read from; null: it has no keys.")
    capacity: int | None = Field(description="How many tasks may run at once, per key.")
    rate: str | None = Field(
        description=('How many tasks may start in a period, per key: "100/m".')
    )
    burst: int | None
    after_seconds: float | None = Field(
        description="Tasks that are not later than this do not count."
    )
    critical: bool = Field(description="Whether some tasks are exempt from waiting.")
    declared: bool = Field(description="Whether the app of this server knows the limit.")
    in_use: int | None = Field(description="Slots in use by running tasks.")
    tokens: float | None = Field(description="Tasks that may start now, if it has no keys.")
    waiting: int = Field(description="Messages that wait for it.")
    first_due: str | None = Field(description="When the first of these messages was due.")
    keys: int | None = Field(
        description="Number of keys in use or waited for; null: it has no keys."
    )
    busiest: list[KeyState] = Field(description="The keys with most waiting messages.")
    shares: list[KeyState]
    overridden: bool = Field(description="Whether other numbers than the declared ones were set.")
    set_by: str | None = Field(description="The user who set them.")
    set_why: str | None
    set_until: str | None = Field(description="When the declared ones apply again; null: no end.")
    declared_capacity: int | None
    declared_rate: str | None


class NewNumbers(Given):
    """New numbers for a limit; numbers that are left out are as declared."""

    concurrency: int | None = Field(None, ge=1, le=1_000_000_000, strict=True)
    rate: str | None = Field(None, max_length=30, description='Such as "100/m".')
    burst: int | None = Field(None, ge=1, le=1_000_000_000, strict=True)
    why: str = Field("", max_length=500)
    length: Lasting | None = Field(
        None, alias="for", description='Reset it after this time: "2h", or seconds.'
    )


class WasReset(BaseModel):
    """Whether other numbers were set."""

    reset: bool


class Limits(BaseModel):
    """A page of limits, by queue and name, and the cursor of the next page."""

    limits: list[LimitState]
    next: str | None = Field(None, description="The cursor of the next page; null: the end.")


class QueueLimits(BaseModel):
    """The gate of a queue."""

    queue: str
    turns_by: str | None = Field(description="Where the key of turns is read from; null: no turns.")
    waiting: int = Field(description="Messages that wait for a limit or for their turn.")
    waiting_for_turn: int
    is_complete: bool = Field(
        description="False if a part was not read because too many messages wait."
    )
    limits: list[LimitState]


class RunningState(BaseModel):
    """A task that runs, or that a worker has claimed and is about to run.

    Its id, its name, its tenant and the time are known in queues with a `Throttler`; elsewhere they
    are null.
    """

    id: str | None
    task: str | None
    queue: str
    tenant: str | None
    worker: str
    since: str | None = Field(description="When the worker claimed it.")
    keys: dict[str, str] = Field(description="Its key in each limit that it has slots of.")
    weights: dict[str, int] = Field(description="How many slots of each it has.")


class RunningTasks(BaseModel):
    """The running tasks that have slots in a queue, as of at most two seconds ago."""

    queue: str
    is_complete: bool = Field(description="False if there are more than 1,000.")
    tasks: list[RunningState]


class LimitDetail(LimitState):
    """A limit with its keys, and some of the tasks that wait for it."""

    page: list[KeyState] = Field(description="Its keys, those with most waiting messages first.")
    tasks: list[TaskState] = Field(description="The first tasks that wait for it.")
    next: str | None = Field(None, description="The cursor of the next keys; null: the end.")


class LimitsQuery(OneQueue):
    """The number of limits, and where to begin."""

    limit: int = Field(100, ge=1, le=1_000)
    cursor: Cursor | None = None


class KeysQuery(Given):
    """Criteria for the keys of a limit."""

    key: Name | None = Field(None, description="Only keys that contain this text.")
    limit: int = Field(100, ge=1, le=1_000)
    cursor: Cursor | None = None


class TenantState(BaseModel):
    """A tenant at the gate of a queue."""

    tenant: str
    queue: str
    waiting: int
    first_due: str | None = Field(description="When the first waiting message was due.")
    weight: float | None = Field(description="How many turns it gets while others get one.")
    turn: int | None = Field(description="1: its turn is next; null: it does not wait for a turn.")
    waits_for: list[WaitInfo]
    in_use: list[UseInfo]


class TenantsQuery(LimitsQuery):
    """Criteria for tenants."""

    tenant: Name | None = Field(
        None, description="A pattern: * stands for any text, ? for any character."
    )


class Tenants(BaseModel):
    """A page of tenants, those with most waiting messages first, and the next page's cursor."""

    tenants: list[TenantState]
    is_complete: bool = Field(
        description="False if a part was not read because too many messages wait."
    )
    next: str | None = Field(None, description="The cursor of the next page; null: the end.")


class OneTenant(BaseModel):
    """A tenant in each queue where tasks of it wait or run."""

    tenant: str
    waiting: int
    queues: list[TenantState]
