"""The options of the Spark sources, with name, default, range and meaning in one place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import date, datetime, time, timezone
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from kombu.utils.url import maybe_sanitize_url

from celery_ext.app.settings import suggestion
from kombu_delayed.errors import OptionError
from kombu_delayed.inspection.backlog import NEVER_MS
from kombu_delayed.message.envelope import eta_to_ms
from kombu_delayed.store.ledgers import OPERATIONS, SCHEDULE

Self = TypeVar("Self", bound="BrokerOptions")

#: Suffixes of the keys of a job.
KEYS = (":state", ":shards", ":pace")

#: These, and those of ledgers of jobs that do not schedule. A job whose name ends so would share a
#: key with another one.
SUFFIXES = (*(f":{each}" for each in OPERATIONS if each != SCHEDULE), *KEYS)

#: The ways to treat unknown columns.
DROP, KWARGS, HEADERS, FAIL = "drop", "kwargs", "headers", "fail"


def _text(value: str) -> str:
    if not value:
        raise ValueError("a text that is not empty")
    return value


def _job_id(value: str) -> str:
    if value.endswith(SUFFIXES):
        raise ValueError("a name that is no key of another job")
    return _text(value)


def _zone(value: str) -> ZoneInfo:
    try:
        return ZoneInfo(value)
    except (ZoneInfoNotFoundError, OSError) as error:
        raise ValueError from error


def _time_of_day(value: str) -> time:
    found = time.fromisoformat(value)
    if found.tzinfo is not None:
        raise ValueError
    return found


def names(value: str) -> tuple[str, ...]:
    """Names separated by commas, or a JSON list of names."""
    text = value.strip()
    found = json.loads(text) if text.startswith("[") else [n.strip() for n in text.split(",")]
    if not all(isinstance(name, str) and name for name in found):
        raise ValueError
    return tuple(found)


def _members(value: str) -> dict[str, Any]:
    found = json.loads(value)
    if not isinstance(found, dict):
        raise ValueError
    return found


class Taken(NamedTuple):
    """The values of an option: `read` raises an error for all that `allowed` does not describe."""

    read: Callable[[str], Any]
    allowed: str


NAMES = Taken(names, "names with commas between them, or a JSON list of names")
TIME = Taken(eta_to_ms, "a time in ISO 8601")


def whole_number(least: int, most: int, allowed: str = "") -> Taken:
    def read(value: str) -> int:
        if not least <= int(value) <= most:
            raise ValueError
        return int(value)

    return Taken(read, allowed or f"a whole number from {least:,} to {most:,}")


def one_of(*names: str) -> Taken:
    def read(value: str) -> str:
        if value not in names:
            raise ValueError
        return value

    return Taken(read, " or ".join(names))


def option(default: Any, taken: Taken, meaning: str, **more: Any) -> Any:
    """A field of an options class."""
    metadata = {**taken._asdict(), "meaning": meaning}
    if callable(default):
        return field(default_factory=default, metadata=metadata, **more)
    return field(default=default, metadata=metadata, **more)


#: Spark stores the options of CREATE TABLE … USING, but passes them to no Python source.
OF_TABLES = (
    ". Spark does not pass on the options of CREATE TABLE … USING: use CREATE TEMPORARY VIEW … "
    "USING kombu_delayed OPTIONS (…), or name them in each query, as in SELECT … FROM t WITH "
    "(broker_env = 'BROKER_URL')"
)


@dataclass(frozen=True)
class BrokerOptions:
    """The connection to the broker. URLs are shown without passwords."""

    broker: str = option(
        "",
        Taken(_text, "a broker URL such as delayed+redis://localhost:6379/0"),
        "The URL of the broker. A password in it is masked wherever it is shown. "
        "`broker_env` keeps it out of the job.",
        repr=False,
    )
    broker_env: str = option(
        "",
        Taken(_text, "the name of an environment variable"),
        "The environment variable with the URL, on the driver and on each executor.",
    )
    app: str = option(
        "",
        Taken(_text, "a Celery app as for `celery -A`, such as proj.celery:app"),
        "The Celery app to send as, with its broker, routes and serializers, where executors can "
        "import it.",
    )
    transport_options: dict[str, Any] = option(  # noqa: RUF009
        dict,
        Taken(_members, "a JSON object"),
        "The transport options, as in `broker_transport_options`.",
        repr=False,
    )

    @classmethod
    def parse(cls: type[Self], given: Mapping[str, Any]) -> Self:
        """Read options from Spark, with names in any case, or from Python values.

        Raises OptionError, which has the option, the value and the allowed values.
        """
        known = {each.name: each for each in fields(cls)}
        values = {}
        for name, value in given.items():
            if name.lower() not in known:
                raise OptionError(
                    f"unknown option {name!r}{suggestion(name, sorted(known), 'there are')}"
                )
            if value is not None:
                values[name.lower()] = _read(known[name.lower()], value)
        return cls(**values)

    def __post_init__(self) -> None:
        given = [n for n in ("broker", "broker_env", "app") if getattr(self, n)]
        if len(given) != 1:
            raise OptionError(
                "give the broker by one of the options broker, broker_env and app"
                + (f", not by {' and '.join(given)}" if given else OF_TABLES)
            )
        if self.app and self.transport_options:
            raise OptionError("option app has its own transport options: leave transport_options")

    @property
    def url(self) -> str:
        """The broker's URL, by default from this machine's environment; "" for that of the app."""
        if not self.broker_env:
            return self.broker
        found = os.environ.get(self.broker_env)
        if not found:
            raise OptionError(
                f"the environment variable {self.broker_env}, which the option broker_env names, "
                "is not set here; it is needed on the driver and on each executor"
            )
        return found


def as_texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as Spark takes them, without those that are None."""
    return {name: as_text(value) for name, value in options.items() if value is not None}


def as_text(value: Any) -> str:
    """A value as a Spark option, which must be a string."""
    if isinstance(value, (datetime, time)):
        return value.isoformat()
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=timezone.utc).isoformat()
    if isinstance(value, (list, tuple, set, frozenset)):
        return json.dumps(list(value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _read(known: Any, value: Any) -> Any:
    shown = "what was given"
    try:
        text = as_text(value)
        shown = repr(maybe_sanitize_url(text))[:200] if known.repr else shown
        return known.metadata["read"](text)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise OptionError(
            f"option {known.name} takes {known.metadata['allowed']}, not {shown}"
        ) from None


@dataclass(frozen=True)
class ReadOptions(BrokerOptions):
    """Options for reading the backlog."""

    queues: tuple[str, ...] = option(
        (),
        NAMES,
        "The queues to read. Default: all with delayed messages, found by scanning all keys"
        " of the broker.",
    )
    due_from: int = option(0, TIME, "Only messages due at this time (UTC) or later.")
    due_to: int = option(NEVER_MS, TIME, "Only messages due before this time (UTC).")
    tasks: tuple[str, ...] = option(
        (),
        Taken(names, "names or patterns with commas between them, or a JSON list of them"),
        "Only tasks with these names; `*`, `?` and `[…]` work as in file names.",
    )
    rows_per_task: int = option(
        50_000,
        whole_number(1, 10_000_000),
        "About how many messages each task of Spark reads.",
    )
    page_size: int = option(
        500,
        whole_number(1, 10_000),
        "About how many messages one call reads. A higher number means longer pauses for "
        "the broker's other clients.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.due_from > self.due_to:
            raise OptionError("option due_from is later than due_to: no message can match")


@dataclass(frozen=True)
class WriteOptions(BrokerOptions):
    """Options for writing a DataFrame: the operation, and its parameters."""

    operation: str = option(SCHEDULE, one_of(*OPERATIONS), "The operation for each row.")
    job_id: str = option(
        lambda: str(uuid4()),
        Taken(_job_id, f"a text that is not empty and does not end in {', '.join(SUFFIXES)}"),
        "The name of the job. When it runs again under the same name, it skips rows that it"
        " has already scheduled, rescheduled or restored. Default: a new name for each run,"
        " and for each batch of a stream.",
    )
    label: str = option(
        "",
        Taken(str, "a text"),
        "A text that the list of jobs shows, such as the place of the rows.",
    )
    total_rows: int = option(
        0,
        whole_number(0, 10**15, "a number of rows"),
        "How many rows there are, from which the list of jobs shows a percentage. 0: unknown.",
    )
    ledger_seconds: int = option(
        86_400,
        whole_number(60, 366 * 86_400, "a number of seconds from 60 to a year"),
        "How long the ledger of a job is kept after its last row.",
    )
    key_columns: tuple[str, ...] = option(
        (),
        Taken(names, "names of columns with commas between them, or a JSON list of them"),
        "The columns from which the id is made, if there is no column `id`. The same values"
        " make the same id each time.",
    )
    queue: str = option(
        "", Taken(_text, "the name of a queue"), "The queue of rows without a queue."
    )
    queues: tuple[str, ...] = option(
        (),
        NAMES,
        "The queues that rows may name. Default: any.",
    )
    extra_columns: str = option(
        DROP,
        one_of(DROP, KWARGS, HEADERS, FAIL),
        "Other columns are left out (`drop`), become keyword arguments or headers of the task,"
        " or are an error (`fail`).",
    )
    time_zone: ZoneInfo = option(  # noqa: RUF009
        lambda: ZoneInfo("UTC"),
        Taken(_zone, "the name of a time zone, such as Europe/Berlin"),
        "The time zone of times that have none: of type `timestamp_ntz` or `date`, or text."
        " Default: UTC.",
    )
    time_of_day: time = option(  # noqa: RUF009
        time(0),
        Taken(_time_of_day, "a time of day, such as 09:30"),
        "The time of day, in `time_zone`, of an `eta` or `expires` that is a date.",
    )
    rejects: str = option(
        "",
        Taken(_text, "the path of a directory, or the URI of one that Spark can write"),
        "The directory for refused rows, as JSON lines with the reason: a URI such as"
        " `s3a://bucket/rejects`, or a path that the driver and all executors share. With this"
        " option, refused rows do not stop the job.",
    )
    max_rejects: int = option(
        0,
        whole_number(0, 1_000_000_000, "a whole number, 0 or more"),
        "Without `rejects`: how many rows of a Spark task may be refused before it fails.",
    )
    batch_size: int = option(
        1_000,
        whole_number(1, 100_000),
        "Rows that are sent together, at most 250 of them in one call of a script. Fewer if they"
        " have more than 8 MB.",
    )
    max_rows_per_second: int = option(
        0,
        whole_number(0, 10_000_000),
        "The most rows that all tasks of the job together write in a second. 0: no limit.",
    )
    latency_budget_ms: int = option(
        1,
        whole_number(0, 60_000),
        "Writers pause after a batch while the broker takes this much longer than usual to answer"
        " a `PING`. 0 disables this.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queue and self.queues and self.queue not in self.queues:
            raise OptionError(
                f"option queue is {self.queue!r}, and the option queues allows only "
                f"{', '.join(self.queues)}"
            )
