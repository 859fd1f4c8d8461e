"""Limits and tenants, as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from .fields import Cursor, Given, Name
from .models import OneQueue, TaskState


class KeyState(BaseModel):
    """A key of a limit; null is what is not counted, or not for who asks."""

    key: str
    in_use: int | None
    waiting: int
    first_due: str | None = Field(description="When the first of those that wait was due.")
    tokens: float | None = Field(None, description="Tasks that may begin now, by its rate.")
    slots: int | None = Field(None, description="Of a share: how many slots it has.")


class LimitState(BaseModel):
    """A limit of a queue, over all its keys."""

    queue: str
    name: str
    kind: Literal["limit", "drain", "shares", "throttler", "undeclared"]
    task: str | None = Field(description="The task that has it; null: the queue has.")
    by: str | None = Field(description="What its keys are read from; null: it has none.")
    capacity: int | None = Field(description="How many may run at once, of each key.")
    rate: str | None = Field(description='How many may begin in a time, of each key: "100/m".')
    burst: int | None
    after_seconds: float | None = Field(description="What is not later than that does not count.")
    critical: bool = Field(description="Whether some tasks need not wait for it.")
    declared: bool = Field(description="Whether the app of this server knows it.")
    in_use: int | None = Field(description="Slots that running tasks have.")
    tokens: float | None = Field(description="Tasks that may begin now, where it has no keys.")
    waiting: int = Field(description="Messages that wait for it.")
    first_due: str | None = Field(description="When the first of them was due.")
    keys: int | None = Field(description="Keys in use or waited for; null: it has none.")
    busiest: list[KeyState] = Field(description="Some of its keys: those that most waits for.")
    shares: list[KeyState]


class Limits(BaseModel):
    """Some limits, by queue and name, and where the next ones begin."""

    limits: list[LimitState]
    next: str | None = Field(None, description="The cursor of the next page; null: the end.")


class QueueLimits(BaseModel):
    """The gate of a queue."""

    queue: str
    turns_by: str | None = Field(description="What turns go by; null: there are none.")
    waiting: int = Field(description="Messages that wait there, for a limit or for their turn.")
    waiting_for_turn: int
    is_complete: bool = Field(description="False where so much waits that a part was not read.")
    limits: list[LimitState]


class LimitDetail(LimitState):
    """A limit with its keys, and some of the tasks that wait for it."""

    page: list[KeyState] = Field(description="Its keys, those that most waits for in front.")
    tasks: list[TaskState] = Field(description="Who waits for it, the first ones.")
    next: str | None = Field(None, description="The cursor of the next keys; null: the end.")


class LimitsQuery(OneQueue):
    """How many limits, and from where on."""

    limit: int = Field(100, ge=1, le=1_000)
    cursor: Cursor | None = None


class KeysQuery(Given):
    """Which keys of a limit."""

    key: Name | None = Field(None, description="Those with this text in them.")
    limit: int = Field(100, ge=1, le=1_000)
    cursor: Cursor | None = None


class WaitState(BaseModel):
    """How many messages wait for a limit; null: for their turn."""

    limit: str | None
    key: str | None
    waiting: int


class UseState(BaseModel):
    """What a tenant has of a limit for each."""

    limit: str
    capacity: int | None
    in_use: int


class TenantState(BaseModel):
    """A tenant at the gate of a queue."""

    tenant: str
    queue: str
    waiting: int
    first_due: str | None = Field(description="When the first of those that wait was due.")
    weight: float | None = Field(description="How many turns it has where others have one.")
    turn: int | None = Field(description="1: its turn is next; null: it waits for none.")
    waits_for: list[WaitState]
    in_use: list[UseState]


class TenantsQuery(LimitsQuery):
    """Which tenants."""

    tenant: Name | None = Field(None, description="With * and ? for any text and character.")


class Tenants(BaseModel):
    """Some tenants, those of whom most waits in front, and where the next ones begin."""

    tenants: list[TenantState]
    is_complete: bool = Field(description="False where so much waits that a part was not read.")
    next: str | None = Field(None, description="The cursor of the next page; null: the end.")


class OneTenant(BaseModel):
    """A tenant in each queue where something of it waits or runs."""

    tenant: str
    waiting: int
    queues: list[TenantState]
