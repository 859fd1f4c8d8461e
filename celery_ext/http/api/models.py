"""Requests and answers, as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, model_validator

from celery_ext.control.counts import ConsumerInfo

from .fields import Cursor, Given, Id, Lasting, Moment, Name, Span, Timed, Where, check_plain

Status = Literal[
    "scheduled",
    "waiting",
    "running",
    "retrying",
    "succeeded",
    "failed",
    "lost",
    "dead",
    "cancelled",
    "expired",
    "rejected",
    "done",
]


class TaskState(BaseModel):
    """A task and its status."""

    id: str
    status: Status
    waiting_for: str | None = Field(None, description="The reason why a task waits.")
    task: str
    queue: str
    due: str | None
    priority: int | None = None
    tenant: str | None = None
    args: str | None = Field(None, description="As shown by Celery, shortened.")
    kwargs: str | None = None
    topic: str | None = None
    callback: str | None = None
    consumer: str | None = None
    reason: str | None = Field(
        None, description="Its error, why it is a dead letter, or the reason of a policy."
    )
    deliveries: int | None = Field(None, description="How often it was delivered without success.")
    retries: int | None = None
    started: str | None = Field(None, description="When its last run began.")
    run_seconds: float | None = Field(None, description="How long its last run took.")
    at: str | None = Field(
        None, description="When it ended, became a dead letter or was cancelled."
    )


class HistoryStep(BaseModel):
    """Something that has happened to a task. Fields that its event does not have are left out."""

    event: str
    at: str
    attempt: int
    worker: str | None = None
    pid: int | None = None
    is_acked_late: bool | None = None
    run_ms: int | None = None
    error: str | None = None
    message: str | None = None
    traceback: str | None = None
    attempts: int | None = Field(None, description="Maximum number of attempts.")
    limit_ms: int | None = Field(None, description="The time limit that it exceeded.")
    next: str | None = Field(None, description="When the next attempt is due.")
    args: str | None = None
    kwargs: str | None = None


class History(BaseModel):
    """The steps of a task over all attempts, the oldest first."""

    id: str
    state: str
    task: str
    queue: str
    tenant: str | None
    worker: str
    root_id: str | None = Field(None, description="The first task of its canvas.")
    parent_id: str | None = Field(None, description="The task that has sent it.")
    group_id: str | None = None
    steps: list[HistoryStep]


class Created(BaseModel):
    """A task that Redis has stored."""

    id: str
    status: Status
    due: str | None


class Page(BaseModel):
    """A page of the matching tasks, and the cursor of the next page."""

    tasks: list[TaskState]
    next: str | None = Field(None, description="The cursor of the next page; null: the end.")


class Filter(Given):
    """Criteria for delayed tasks."""

    queue: Name | None = None
    task: Name | None = Field(
        None, description="A pattern: * stands for any text, ? for any character."
    )
    tenant: Name | None = None
    where: Where | None = Field(
        None,
        description="Conditions on arguments, such as `args.customer_id == 7`, joined with `and`. "
        "Operators: == != < <= > >= ~ (a pattern) contains.",
    )
    due_after: Moment | None = None
    due_before: Moment | None = None
    cursor: Cursor | None = None

    @property
    def criteria(self) -> dict[str, Any]:
        """The given criteria, without the cursor."""
        return self.model_dump(include=Filter.model_fields.keys() - {"cursor"}, exclude_none=True)


class Search(Filter):
    """Criteria for tasks in a state, and the size of a page."""

    state: Literal["scheduled", "ready", "running", "retrying", "failed", "slow", "dead"] = Field(
        "scheduled", description="The state of the tasks. Ready ones wait for a free worker."
    )
    error: Name | None = Field(
        None,
        description="A pattern for the error of tasks that failed or are retried: its type, or "
        "its type and text.",
    )
    worker: Name | None = Field(
        None, description="A pattern for the worker that had a recorded task last."
    )
    longer_than: Span | None = Field(
        None, description="Recorded tasks that have run longer, such as `90s`."
    )
    shorter_than: Span | None = Field(None, description="Recorded tasks that have run for less.")

    limit: int = Field(100, ge=1, le=1_000)

    @property
    def recorded_only(self) -> dict[str, Any]:
        """The given criteria that only tasks have that workers have recorded."""
        return self.model_dump(
            include={"error", "worker", "longer_than", "shorter_than"}, exclude_none=True
        )


class OneQueue(Given):
    """The queue to look in."""

    queue: Name | None = None


class QueueCounts(BaseModel):
    """A queue's messages by state."""

    queue: str
    delayed: int
    due: int
    ready: int
    unacked: int
    dead: int


class QueueMetrics(QueueCounts):
    """A queue, and the tasks due soon; times are seconds."""

    work: int = Field(
        description="Work of the next minute: ready, due, unacked, and due within it."
    )
    consumers: int
    oldest_due_seconds: float
    next_due_seconds: float | None
    due_within_minute: int
    due_within_hour: int
    due_within_day: int
    is_estimate: bool
    waiting: int = Field(description="Those of `due` that wait for their turn or for a limit.")
    oldest_waiting_seconds: float
    paused: bool = Field(description="Whether the queue is paused; then nothing of it is late.")


class Queues(BaseModel):
    """All queues."""

    queues: list[QueueCounts]


class Part(Given):
    """A part of a queue: the tasks of a name, in which * is any text, or of a tenant."""

    task: str | None = Field(None, min_length=1, max_length=500)
    tenant: str | None = Field(None, min_length=1, max_length=500)


class NewPause(Part):
    """A pause of a queue, or of a part if one is named, with its reason and length."""

    why: str = Field("", max_length=500)
    length: Lasting | None = Field(
        None, alias="for", description='Resume after this time: "2h", or seconds.'
    )


class PausedPart(BaseModel):
    """A pause: since when, until when (null: it has no end), by whom and why.

    `task` and `tenant` are null unless only that part of the queue is paused.
    """

    task: str | None
    tenant: str | None
    since: str | None
    until: str | None
    by: str | None
    why: str | None


class PauseState(PausedPart):
    """Whether a queue, or the part of it that was asked for, is paused, and which parts are."""

    queue: str
    paused: bool
    parts: list[PausedPart]


class ForecastQuery(OneQueue):
    """How far to look ahead."""

    hours: float = Field(24, gt=0, le=87_600)
    buckets: int = Field(24, ge=1, le=200)


class ForecastBucket(BaseModel):
    """How many tasks are due within a time."""

    start: str
    seconds: float
    count: int


class ForecastAnswer(BaseModel):
    """How many tasks will be due."""

    total: int
    overdue: int
    later: int
    buckets: list[ForecastBucket]


class Consumers(BaseModel):
    """All consumers."""

    consumers: list[ConsumerInfo]


class DeadQuery(OneQueue):
    """The selected dead letters."""

    task: Name | None = None
    reason: Annotated[str, StringConstraints(max_length=2_000)] | None = Field(
        None, description="A pattern: * stands for any text, ? for any character."
    )
    limit: int = Field(100, ge=1, le=1_000)
    cursor: Cursor | None = None


class DeadState(BaseModel):
    """A dead letter."""

    id: str
    letter_id: str
    task: str
    queue: str
    tenant: str | None
    reason: str
    consumer: str
    at: str
    deliveries: int


class DeadPage(BaseModel):
    """A page of dead letters, and the cursor of the next page."""

    letters: list[DeadState]
    next: str | None


class DeadChoice(Given):
    """Dead letters by their ids."""

    ids: list[Name] = Field(min_length=1, max_length=1_000)
    queue: Name | None = None


class ReplayChoice(DeadChoice, Timed):
    """The dead letters to replay, now or at a time."""


class Changed(BaseModel):
    """How many were changed."""

    changed: int


class EventQuery(OneQueue):
    """Criteria for lifecycle events."""

    task_id: Id | None = None
    event: Annotated[str, StringConstraints(pattern=r"^[a-z]{1,20}$")] | None = None


class NewAnswer(Given):
    """An answer that a task expects: `payload`, or `error` if there will be none."""

    payload: Any = Field(None, description="Any JSON.")
    error: Annotated[str, StringConstraints(min_length=1, max_length=10_000)] | None = None
    tenant: Name | None = None
    id: Id | None = Field(
        None, description="Id of the answer: repeating it returns the same outcome."
    )

    @model_validator(mode="after")
    def _one(self) -> NewAnswer:
        if ("payload" in self.model_fields_set) == (self.error is not None):
            raise ValueError("payload: give either payload or error")
        check_plain(self, "payload")
        return self


class AnswerOutcome(BaseModel):
    """The effect of an answer."""

    key: str
    outcome: Literal["accepted", "early"]


class ProblemField(BaseModel):
    """An invalid field."""

    field: str
    detail: str


class ProblemAnswer(BaseModel):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[ProblemField] | None = None
