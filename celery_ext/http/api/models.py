"""What requests and answers hold, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.functional_validators import AfterValidator, BeforeValidator

from celery_ext.tasks.body import CELERY_HEADERS
from celery_ext.tasks.times import from_ms
from kombu_delayed.message.durations import parse_length
from kombu_delayed.message.envelope import eta_to_ms, parse_iso8601

#: A thousand years: a mistake rather than a wish.
LONGEST = timedelta(days=365_000)

#: Headers that are Celery's or the transport's: who sets them could send another task, or to
#: another queue. So are all that begin with `delayed_`.
RESERVED = CELERY_HEADERS | {"compression", "redelivered", "task", "tenant", "x-delay"}

_TYPED = {"__type__", "__value__"}

ID_PATTERN = r"^[A-Za-z0-9_.:@=-]{1,200}$"


def _moment(text: str) -> str:
    try:
        aware(text)
    except (ValueError, OverflowError):
        raise ValueError(
            "not a time: give ISO 8601, such as 2030-01-31T09:00:00Z (UTC without a zone)"
        ) from None
    return text


def aware(text: str) -> datetime:
    """A time in UTC, which it is without a zone. Raises ValueError and OverflowError."""
    at = parse_iso8601(text)
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)


@lru_cache(maxsize=1_000, typed=True)
def span_of(value: str | float) -> timedelta:
    """A length of time that is not negative. Raises ValueError."""
    return parse_length(value, (timedelta(0), LONGEST))


def _span(value: Any) -> Any:
    if isinstance(value, (str, int, float)):
        span_of(value)
    return value


SPAN_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "string",
            "pattern": r"^(\d{1,5}(\.\d{1,3})?(ms|[smhd])|\d{1,4}w)+$",
            "maxLength": 20,
        },
        {"type": "number", "minimum": 0, "maximum": 3e10},
    ]
}
MOMENT_SCHEMA: dict[str, Any] = {"type": "string", "format": "date-time"}

Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
Name = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,300}$")]
Moment = Annotated[str, AfterValidator(_moment), Field(json_schema_extra=MOMENT_SCHEMA)]
Span = Annotated[
    float | str,
    BeforeValidator(_span),  # before True is taken for 1
    Field(json_schema_extra=SPAN_SCHEMA),
]
Cursor = Annotated[str, StringConstraints(max_length=2_000)]
Priority = Annotated[int, Field(ge=0, le=255, strict=True)]
HeaderValue = str | int | float | bool | None


class Given(BaseModel):
    """What somebody sends: nothing unknown is taken."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Timed(Given):
    """With a due time: `due` or `delay`, or neither."""

    due: Moment | None = Field(None, description="When it is due, ISO 8601.")
    delay: Span | None = Field(None, description='How long from now: "15s", "3d", or seconds.')

    @model_validator(mode="after")
    def _either(self) -> Timed:
        if self.due is not None and self.delay is not None:
            raise ValueError("due: give either due or delay")
        return self

    @property
    def due_at(self) -> datetime | None:
        """The due time in UTC, in whole ms as the broker has it; None: none was given."""
        if self.due is not None:
            return from_ms(eta_to_ms(aware(self.due)))
        if self.delay is not None:
            return from_ms(eta_to_ms(datetime.now(timezone.utc) + span_of(self.delay)))
        return None


class NewTask(Timed):
    """A Celery task, or an HTTP job: `topic` and `callback` instead of `task`."""

    task: Name | None = Field(None, description="Name of the task.")
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    topic: Name | None = Field(None, description="HTTP job: what the receiver knows it by.")
    callback: str | None = Field(
        None, max_length=2_000, description="HTTP job: the URL that gets a POST when it is due."
    )
    content: Any = Field(None, description="HTTP job: what is posted, any JSON.")
    retry: int = Field(3, ge=0, le=30, description="HTTP job: how often it is tried again.")
    queue: Name | None = None
    priority: Priority | None = None
    expires: Moment | None = Field(None, description="A task that begins later is skipped.")
    tenant: Name | None = None
    headers: dict[str, HeaderValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_kind(self) -> NewTask:
        if self.task is None and (self.topic is None or self.callback is None):
            raise ValueError("task: give task, or topic and callback")
        given = self.model_fields_set
        if self.task is not None and (wrong := given & {"topic", "callback", "content", "retry"}):
            raise ValueError(f"{min(wrong)}: a task has none; leave task out for an HTTP job")
        if self.task is None and (wrong := given & {"args", "kwargs"}):
            raise ValueError(f"{min(wrong)}: an HTTP job has content instead")
        if self.headers:
            _check_headers(self.headers)
        check_plain(self, "args", "kwargs", "content")
        return self

    @property
    def is_job(self) -> bool:
        """Whether it is an HTTP job."""
        return self.task is None


def _check_headers(headers: Mapping[str, Any]) -> None:
    names = [name.lower() for name in headers]
    taken = {name for name in names if name in RESERVED or name.startswith("delayed_")}
    if taken:
        raise ValueError(f"headers: {', '.join(sorted(taken))} cannot be set")


def check_plain(given: BaseModel, *names: str) -> None:
    """Who sends JSON must not have Kombu make other objects of it. Raises ValueError."""
    for name in names:
        value = getattr(given, name)
        if value and not is_plain(value):
            raise ValueError(f"{name}: objects of __type__ and __value__ are not taken")


def is_plain(value: Any) -> bool:
    """Whether Kombu reads JSON as what it is."""
    if isinstance(value, dict):
        if value.keys() == _TYPED:
            return False
        value = value.values()
    elif not isinstance(value, list):
        return True
    for part in value:  # noqa: SIM110 - of each line of NDJSON, and calls take most of the time
        if isinstance(part, (dict, list)) and not is_plain(part):
            return False
    return True


class NewTaskWithId(NewTask):
    """As for `PUT`, with an id of its own; without one it gets one."""

    id: Id | None = None


class TaskChange(Timed):
    """What is to be another one."""

    priority: Priority | None = None
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _something(self) -> TaskChange:
        if all(getattr(self, name) is None for name in type(self).model_fields):
            raise ValueError("due: give due, delay, priority, args or kwargs")
        check_plain(self, "args", "kwargs")
        return self


Status = Literal[
    "scheduled",
    "waiting",
    "running",
    "done",
    "dead",
    "cancelled",
]


class TaskState(BaseModel):
    """A task and how far it is."""

    id: str
    status: Status
    waiting_for: str | None = Field(None, description="What a waiting task waits for.")
    task: str
    queue: str
    due: str | None
    priority: int | None = None
    tenant: str | None = None
    args: str | None = Field(None, description="As Celery shows them, shortened.")
    kwargs: str | None = None
    topic: str | None = None
    callback: str | None = None
    consumer: str | None = None
    reason: str | None = Field(None, description="Why it is dead, or what a policy says of it.")
    deliveries: int | None = Field(None, description="How often it was delivered in vain.")
    retries: int | None = None
    at: str | None = Field(None, description="When it became done, dead or cancelled.")


class Created(BaseModel):
    """A task that Redis has."""

    id: str
    status: Status
    due: str | None


class Page(BaseModel):
    """Some of the tasks that are meant, and where the next ones begin."""

    tasks: list[TaskState]
    next: str | None = Field(None, description="The cursor of the next page; null: the end.")


class Filter(Given):
    """Which delayed tasks are meant."""

    queue: Name | None = None
    task: Name | None = Field(None, description="With * and ? for any text and character.")
    tenant: Name | None = None
    due_after: Moment | None = None
    due_before: Moment | None = None
    cursor: Cursor | None = None


class Search(Filter):
    """Of these, how many at a time."""

    limit: int = Field(100, ge=1, le=1_000)


class OneQueue(Given):
    """Where to look."""

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
    """A queue, and what is due soon; times are seconds."""

    work: int = Field(description="To be done within a minute: ready, due, unacked, due in it.")
    consumers: int
    oldest_due_seconds: float
    next_due_seconds: float | None
    due_within_minute: int
    due_within_hour: int
    due_within_day: int
    is_estimate: bool
    waiting: int = Field(description="Of `due`, those that wait for their turn or for a limit.")
    oldest_waiting_seconds: float


class Queues(BaseModel):
    """All queues."""

    queues: list[QueueCounts]


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
    """Due load ahead."""

    total: int
    overdue: int
    later: int
    buckets: list[ForecastBucket]


class ConsumerState(BaseModel):
    """Who consumes a queue."""

    queue: str
    name: str
    lease_seconds: float
    unacked: int


class Consumers(BaseModel):
    """All consumers."""

    consumers: list[ConsumerState]


class DeadQuery(OneQueue):
    """Which dead letters are meant."""

    task: Name | None = None
    reason: Annotated[str, StringConstraints(max_length=2_000)] | None = Field(
        None, description="With * and ? for any text and character."
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
    """Some dead letters, and where the next ones begin."""

    letters: list[DeadState]
    next: str | None


class DeadChoice(Given):
    """Dead letters by their ids."""

    ids: list[Name] = Field(min_length=1, max_length=1_000)
    queue: Name | None = None


class ReplayChoice(DeadChoice, Timed):
    """Dead letters that are tried again, now or at a time."""


class Changed(BaseModel):
    """How many there were."""

    changed: int


class EventQuery(OneQueue):
    """Which lifecycle events are meant."""

    task_id: Id | None = None
    event: Annotated[str, StringConstraints(pattern=r"^[a-z]{1,20}$")] | None = None


class NewAnswer(Given):
    """An answer to what a task has asked: `payload`, or `error` where there will be none."""

    payload: Any = Field(None, description="Any JSON.")
    error: Annotated[str, StringConstraints(min_length=1, max_length=10_000)] | None = None
    tenant: Name | None = None
    id: Id | None = Field(None, description="Of the answer: sent again it is told the same.")

    @model_validator(mode="after")
    def _one(self) -> NewAnswer:
        if ("payload" in self.model_fields_set) == (self.error is not None):
            raise ValueError("payload: give either payload or error")
        return self


class AnswerOutcome(BaseModel):
    """What became of an answer."""

    key: str
    outcome: Literal["accepted", "early"]


class ProblemField(BaseModel):
    """What is wrong with a field."""

    field: str
    detail: str


class ProblemAnswer(BaseModel):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[ProblemField] | None = None
