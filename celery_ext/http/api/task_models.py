"""The requests that create and change tasks and HTTP jobs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, WithJsonSchema, model_validator
from pydantic.functional_validators import AfterValidator, BeforeValidator

from celery_ext.http.callbacks.job_options import WITHOUT_BODY, check_headers
from celery_ext.tasks.body import CELERY_HEADERS
from kombu_delayed.message.durations import parse_length

from .fields import SPAN_SCHEMA, Given, Id, Moment, Name, Priority, QueueName, Timed, check_plain

#: Headers of Celery or the transport: a client that sets them could send another task, or to
#: another queue. All headers that begin with `delayed_` are reserved, too.
RESERVED = CELERY_HEADERS | {"compression", "redelivered", "task", "tenant", "x-delay"}

HeaderValue = str | int | float | bool | None

_NEW_TASKS: list[Any] = [
    {"task": "shop.send_mail", "args": [7], "delay": "1h"},
    {
        "topic": "order",
        "callback": "https://hooks.example.com/orders/7",
        "content": {"order": 7},
        "delay": "15m",
        "method": "PUT",
        "callback_headers": {"Authorization": "Bearer secret"},
        "timeout": "5s",
        "backoff": {"pauses": ["10s", "1m", "10m"]},
        "failure_callback": "https://hooks.example.com/failed",
    },
]


WEEK, HOUR = timedelta(days=7), timedelta(hours=1)


def _read(longest: timedelta) -> BeforeValidator:
    """Reads a length of time like a `Span`, of at least one second, as seconds."""
    bounds = timedelta(seconds=1), longest
    return BeforeValidator(lambda value: parse_length(value, bounds).total_seconds())


def _shown(longest: timedelta) -> WithJsonSchema:
    text, number = SPAN_SCHEMA["anyOf"]
    bounds = {"minimum": 1, "maximum": longest.total_seconds()}
    return WithJsonSchema({"anyOf": [text, {**number, **bounds}]})


def _checked_headers(headers: dict[str, str]) -> dict[str, str]:
    check_headers(headers)
    return headers


Pause = Annotated[float, _read(WEEK), _shown(WEEK)]
Timeout = Annotated[float, _read(HOUR), _shown(HOUR)]
Url = Annotated[str, StringConstraints(max_length=2_000)]


class JobBackoff(Given):
    """The pauses between the attempts of an HTTP job: `pause`, which grows, or `pauses`."""

    pause: Pause | None = Field(None, description="The first pause.")
    factor: float = Field(2, ge=1, le=10, description="How many times as long the next one is.")
    longest: Pause = Field(86_400, description="The longest pause.")
    pauses: Annotated[list[Pause], Field(min_length=1, max_length=30)] | None = Field(
        None, description="A list of all pauses: one for each retry."
    )
    jitter: float = Field(0.1, ge=0, le=1, description="Part by which a pause varies at random.")

    @model_validator(mode="after")
    def _one_form(self) -> JobBackoff:
        if (self.pause is None) == (self.pauses is None):
            raise ValueError("give either pause, such as 10s, or pauses, such as [10, 60]")
        if self.pauses and (wrong := self.model_fields_set & {"factor", "longest"}):
            raise ValueError(f"{min(wrong)} is only for pause; leave it out with pauses")
        return self

    def stored(self) -> dict[str, Any]:
        """The arguments of a `Backoff`."""
        longest = max(self.pauses) if self.pauses else self.longest
        more = {"factor": self.factor, "longest": longest, "jitter": self.jitter}
        return {"seconds": self.pauses or self.pause, **more}


class JobFields(Timed):
    """The fields that only an HTTP job has."""

    topic: Name | None = Field(None, description="HTTP job: its topic, which the receiver gets.")
    callback: Url | None = Field(
        None, description="HTTP job: the URL that is called at the due time."
    )
    content: Any = Field(None, description="HTTP job: the content to send, any JSON.")
    method: Literal["POST", "PUT", "PATCH", "DELETE", "GET"] = Field(
        "POST", description="HTTP job: the method. GET and DELETE have no body, so no content."
    )
    callback_headers: Annotated[dict[str, str], AfterValidator(_checked_headers)] = Field(
        default_factory=dict,
        description="HTTP job: headers of the request. Not Host, Content-Length and others that "
        "frame a request, and not those that begin with webhook- or delayed-.",
    )
    timeout: Timeout | None = Field(None, description="HTTP job: how long a callback may take.")
    retry: int = Field(3, ge=0, le=30, description="HTTP job: the number of retries.")
    backoff: JobBackoff | None = Field(None, description="HTTP job: the pauses between attempts.")
    failure_callback: Url | None = Field(
        None, description="HTTP job: the URL that gets a POST when the job becomes a dead letter."
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> JobFields:
        given = self.model_fields_set
        if self.method in WITHOUT_BODY and "content" in given:
            raise ValueError(f"content: {self.method} sends none; leave it out or use POST")
        if "retry" in given and self.backoff and self.backoff.pauses:
            raise ValueError("retry: leave it out; pauses has one for each retry")
        return self

    @property
    def retries(self) -> int:
        return len(self.backoff.pauses) if self.backoff and self.backoff.pauses else self.retry

    @property
    def job_options(self) -> dict[str, Any]:
        """The fields of `JobOptions` that were given."""
        found = {
            "method": self.method if self.method != "POST" else None,
            "headers": self.callback_headers,
            "timeout": self.timeout,
            "backoff": self.backoff.stored() if self.backoff else None,
            "failure_callback": self.failure_callback,
        }
        return {name: value for name, value in found.items() if value}


#: The names of the fields that only an HTTP job has.
JOB_FIELDS = JobFields.model_fields.keys() - Timed.model_fields.keys()


class NewTask(JobFields):
    """A Celery task, or an HTTP job: `topic` and `callback` instead of `task`."""

    model_config = ConfigDict(json_schema_extra={"examples": _NEW_TASKS})

    task: Name | None = Field(None, description="Name of the task.")
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    queue: QueueName | None = None
    priority: Priority | None = None
    expires: Moment | None = Field(None, description="A task that would start later is skipped.")
    tenant: Name | None = None
    headers: dict[str, HeaderValue] = Field(default_factory=dict)
    policies: Annotated[list[dict[str, dict[str, Any]]], Field(max_length=20)] = Field(
        default_factory=list,
        description="Policies of this task alone: Backoff, DropOlder, Spread, Timeout or Window, "
        'each with its arguments, such as {"Timeout": {"after": "1h"}}.',
    )

    @model_validator(mode="after")
    def _one_kind(self) -> NewTask:
        if self.task is None and (self.topic is None or self.callback is None):
            raise ValueError("task: give task, or topic and callback")
        given = self.model_fields_set
        if self.task is not None and (wrong := given & JOB_FIELDS):
            raise ValueError(f"{min(wrong)}: a task has none; leave task out for an HTTP job")
        if self.task is None and (wrong := given & {"args", "kwargs"}):
            raise ValueError(f"{min(wrong)}: an HTTP job has content instead")
        if self.task is None and "policies" in given:
            raise ValueError("policies: an HTTP job has retry, backoff and timeout instead")
        if self.headers:
            _check_headers(self.headers)
        check_plain(self, "args", "kwargs", "content", "policies")
        return self

    @property
    def is_job(self) -> bool:
        return self.task is None


def _check_headers(headers: Mapping[str, Any]) -> None:
    names = [name.lower() for name in headers]
    taken = {name for name in names if name in RESERVED or name.startswith("delayed_")}
    if taken:
        raise ValueError(f"headers: {', '.join(sorted(taken))} cannot be set")


class NewTaskWithId(NewTask):
    """As for `PUT`, with an optional id; without one, the task gets a new id."""

    id: Id | None = None


class TaskChange(Timed):
    """The new values of a task; null leaves a value unchanged."""

    priority: Priority | None = None
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _something(self) -> TaskChange:
        if all(getattr(self, name) is None for name in type(self).model_fields):
            raise ValueError("due: give due, delay, priority, args or kwargs")
        check_plain(self, "args", "kwargs")
        return self
