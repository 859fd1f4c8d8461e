"""Requests and answers of bulk changes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints, model_validator

from .fields import Cursor, Name, Timed
from .models import Filter, TaskState

_DRY_RUN = Field(False, description="Only show what would be changed.")
_MOST = Field(1_000, ge=1, le=10_000, description="Maximum number of changes.")


class BulkChoice(Filter):
    """The tasks to change; at least one criterion is needed."""

    state: Literal["scheduled", "ready"] = "scheduled"
    dry_run: bool = _DRY_RUN
    limit: int = _MOST

    @model_validator(mode="after")
    def _criterion(self) -> BulkChoice:
        if not self.criteria:
            raise ValueError(
                "queue: give a queue, a task (* for any), a tenant, where or due times"
            )
        for name in ("due_after", "due_before"):
            if self.state == "ready" and getattr(self, name) is not None:
                raise ValueError(f"{name}: only delayed tasks are chosen by due time")
        return self


class BulkMove(BulkChoice, Timed):
    """The tasks to move, and their due time."""


class BulkRedirect(BulkChoice):
    """The tasks to move to another queue, and its name."""

    to_queue: Name


class BulkReplay(Timed):
    """The dead letters to replay, now or at a time; at least one criterion is needed."""

    to_queue: Name | None = Field(
        None, description="Another queue to replay them in, now; null: each in its own."
    )

    queue: Name | None = None
    task: Name | None = None
    reason: Annotated[str, StringConstraints(min_length=1, max_length=2_000)] | None = Field(
        None, description="A pattern: * stands for any text, ? for any character."
    )
    tenant: Name | None = None
    cursor: Cursor | None = None
    dry_run: bool = _DRY_RUN
    limit: int = _MOST

    @model_validator(mode="after")
    def _criterion(self) -> BulkReplay:
        if not (self.queue or self.task or self.reason or self.tenant):
            raise ValueError("queue: give a queue, a task (* for any), a reason or a tenant")
        if self.to_queue is not None and self.due_at is not None:
            raise ValueError("to_queue: letters are replayed in another queue now, not at a time")
        return self


class BulkOutcome(BaseModel):
    """The changed tasks, or with `dry_run` those that would be changed."""

    matched: int
    changed: int
    dry_run: bool
    queues: dict[str, int] = Field(description="How many matched in each queue.")
    sample: list[TaskState] = Field(description="The first ten, as they were.")
    next: str | None = Field(description="The cursor for the next request; null: the end.")
