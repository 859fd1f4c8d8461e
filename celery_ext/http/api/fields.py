"""The fields of requests: which values they accept, and how these are read."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from functools import lru_cache, partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.functional_validators import AfterValidator, BeforeValidator

from celery_ext.errors import QueryError
from celery_ext.tasks.arguments import LONGEST as LONGEST_WHERE
from celery_ext.tasks.arguments import conditions
from celery_ext.tasks.times import from_ms
from kombu_delayed.message.durations import PERIOD, Bounds, parse_length
from kombu_delayed.message.envelope import eta_to_ms, parse_iso8601
from kombu_delayed.store.calls.shards import CELERY_OWN
from kombu_delayed.store.keys import is_taken

#: The longest time that is accepted: more than a thousand years is a mistake.
LONGEST = timedelta(days=365_000)

#: The most characters of a length of time.
SPAN_SIZE = 20

_TYPED = {"__type__", "__value__"}

#: How deep lists and objects may be nested: a worker that cannot pickle a task ends.
DEEPEST = 100

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
    """Read a time as UTC, which is also the default zone. Raises ValueError and OverflowError."""
    at = parse_iso8601(text)
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)


def _queue_name(name: str) -> str:
    if is_taken(name) or CELERY_OWN.search(name):
        raise ValueError(f"not a queue for tasks: {name!r} has another use in the broker")
    return name


def _where(text: str) -> str:
    try:
        conditions(text)
    except QueryError as error:
        raise ValueError(str(error).removeprefix("where=")) from None
    return text


_ANY: Bounds = (timedelta(0), LONGEST)


@lru_cache(maxsize=1_000, typed=True)
def span_of(value: str | float, within: Bounds = _ANY) -> timedelta:
    """Read a length of time. Raises ValueError, for a negative one too."""
    return parse_length(value, within)


def _span(value: Any, within: Bounds = _ANY) -> Any:
    if isinstance(value, str) and len(value) > SPAN_SIZE:
        raise ValueError(f"a length of time, such as '90m', has at most {SPAN_SIZE} characters")
    if isinstance(value, (str, int, float)):
        span_of(value, within)
    return value


def _span_schema(within: Bounds) -> dict[str, Any]:
    least, most = (each.total_seconds() for each in within)
    text = {
        "type": "string",
        "pattern": r"^(\d{1,5}(\.\d{1,3})?(ms|[smhd])|\d{1,4}w)+$",
        "maxLength": SPAN_SIZE,
    }
    return {"anyOf": [text, {"type": "number", "minimum": least, "maximum": most}]}


SPAN_SCHEMA = _span_schema(_ANY)
MOMENT_SCHEMA: dict[str, Any] = {"type": "string", "format": "date-time"}

Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
Name = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,300}$")]
#: The name of a queue that tasks may be sent to.
QueueName = Annotated[Name, AfterValidator(_queue_name)]
Where = Annotated[
    str, StringConstraints(min_length=1, max_length=LONGEST_WHERE), AfterValidator(_where)
]
Moment = Annotated[str, AfterValidator(_moment), Field(json_schema_extra=MOMENT_SCHEMA)]
Span = Annotated[
    float | str,
    BeforeValidator(_span),  # before True is read as 1
    Field(json_schema_extra=SPAN_SCHEMA),
]
#: How long something lasts: a `Span` that a pause or new numbers of a limit may have.
Lasting = Annotated[
    float | str,
    BeforeValidator(partial(_span, within=PERIOD)),
    Field(json_schema_extra=_span_schema(PERIOD)),
]
Cursor = Annotated[str, StringConstraints(max_length=2_000)]
Priority = Annotated[int, Field(ge=0, le=255, strict=True)]


class Given(BaseModel):
    """The base of requests: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Timed(Given):
    """A request with a due time: `due` or `delay`, or neither."""

    due: Moment | None = Field(None, description="The due time, in ISO 8601.")
    delay: Span | None = Field(None, description='The delay from now: "15s", "3d", or seconds.')

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

    @property
    def due_ms(self) -> int:
        """The due time in ms since the epoch; 0: none was given."""
        return eta_to_ms(at) if (at := self.due_at) else 0


def check_plain(given: BaseModel, *names: str) -> None:
    """Raise ValueError for what Kombu would turn into other objects, or workers cannot pickle."""
    for name in names:
        if value := getattr(given, name):
            _check_plain(name, value, DEEPEST)


def _check_plain(name: str, value: Any, levels: int) -> None:
    if isinstance(value, dict):
        if value.keys() == _TYPED:
            raise ValueError(f"{name}: objects with __type__ and __value__ are not accepted")
        value = value.values()
    elif not isinstance(value, list):
        return
    if not levels:
        raise ValueError(
            f"{name}: lists and objects within each other have at most {DEEPEST} levels"
        )
    for part in value:
        if isinstance(part, (dict, list)):
            _check_plain(name, part, levels - 1)
