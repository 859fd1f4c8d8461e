"""The rows of a DataFrame as Celery's bulk scheduling, or a change of the backlog, takes them."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid5

import pyarrow

from celery_ext.rows import RowError
from celery_ext.times import EPOCH, from_ms, from_now_ms
from kombu_delayed.errors import OptionError
from kombu_delayed.message import eta_to_ms, parse_iso8601

from .options import CANCEL, RESCHEDULE, SCHEDULE, WriteOptions

Row = dict[str, Any]

#: Of the ids that are made from key columns.
NAMESPACE = UUID("6c1c2f0e-8d35-5f0e-9a53-6b1f6d1f3c7a")

_NUMBER = r"tinyint|smallint|int|bigint|float|double|decimal\(.*\)"
_TIME = "timestamp|string"

#: Columns with the Spark types that they may have.
_TYPES = {
    "id": "string",
    "task": "string",
    "args": "string|array<.*>|struct<.*>",
    "kwargs": r"string|map<string,.*>|struct<.*>",
    "eta": _TIME,
    "countdown": _NUMBER,
    "queue": "string",
    "priority": "tinyint|smallint|int|bigint",
    "headers": "string|map<string,.*>|struct<.*>",
    "expires": f"{_TIME}|{_NUMBER}",
}
COLUMNS = {
    SCHEDULE: tuple(_TYPES),
    CANCEL: ("id", "queue"),
    RESCHEDULE: ("id", "queue", "eta", "countdown"),
}


def check_columns(types: Mapping[str, str], options: WriteOptions) -> None:
    """Check a DataFrame's columns, given with their Spark types, before any task runs.

    Raises OptionError that names the column and what is allowed.
    """
    operation, keys = options.operation, options.key_columns
    known = COLUMNS[operation]
    unknown = [name for name in types if name not in known and name not in keys]
    if unknown:
        close = difflib.get_close_matches(unknown[0].lower(), known, n=1)
        raise OptionError(
            f"{operation} knows no column {', '.join(map(repr, unknown))}"
            + (f"; did you mean {close[0]!r}?" if close else f"; it takes {', '.join(known)}")
        )
    for name in set(types) & set(known) - set(keys):
        if not re.fullmatch(_TYPES[name], types[name]):
            raise OptionError(f"column {name} cannot be of type {types[name]}{_hint(name)}")
    for missing in (name for name in keys if name not in types):
        raise OptionError(f"option key_columns names {missing!r}, which is no column")
    _check_needed(types, options)


def _hint(name: str) -> str:
    return f", but only {_TYPES[name].replace('|', ', ').replace('.*', '…').replace(chr(92), '')}"


def _check_needed(types: Mapping[str, str], options: WriteOptions) -> None:
    operation = options.operation
    if ("id" in types) == bool(options.key_columns):
        raise OptionError(
            "give either a column id or the option key_columns, from which ids are made: a row "
            "must have the same id each time, or a task of Spark that is run again would "
            f"{operation} it again"
        )
    if operation == SCHEDULE and "task" not in types:
        raise OptionError("there is no column task, the name of the task of each row")
    if operation != SCHEDULE and "queue" not in types and not options.queue:
        raise OptionError(f"{operation} needs a column queue or the option queue")
    if operation != CANCEL and not {"eta", "countdown"} & set(types):
        raise OptionError(f"{operation} needs a column eta or countdown: when it is due")


def key_id(values: Iterable[Any]) -> str:
    """The id that is made from the values of key columns. Raises RowError where one is null."""
    texts = [_key_text(value) for value in values]
    if None in texts:
        raise RowError("a key column is null, so that the row has no id")
    if unreadable := next((each for each in texts if isinstance(each, Unreadable)), None):
        raise RowError(f"a key column has {unreadable}")
    return str(uuid5(NAMESPACE, json.dumps(texts)))


def _key_text(value: Any) -> Any:
    if isinstance(value, datetime):
        return (value.astimezone(timezone.utc) if value.tzinfo else value).isoformat()
    if isinstance(value, date):
        return value.isoformat()
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


class Rows:
    """Iterates over what rows mean; those that mean nothing are given to `refuse` with a reason.

    To be scheduled, a row is what `celery_ext.bulk.schedule_many` takes; to be cancelled or
    rescheduled it is (queue, id, due, eta).
    """

    def __init__(
        self,
        batches: Iterable[pyarrow.RecordBatch],
        options: WriteOptions,
        default_queue: str,
        refuse: Callable[[Row, str], None],
    ) -> None:
        self._batches = batches
        self._options = options
        self._queue = options.queue or (default_queue if options.operation == SCHEDULE else "")
        self._refuse = refuse
        self._names = COLUMNS[options.operation][1:]
        makers: dict[str, Callable[..., tuple[Any, ...]]] = {
            SCHEDULE: self._call,
            CANCEL: self._cancel,
            RESCHEDULE: self._move,
        }
        self._make = makers[options.operation]
        self._columns: dict[str, list[Any]] = {}
        self._at = 0

    @property
    def current(self) -> Row:
        """The row that was read last, with all its columns."""
        return {name: values[self._at] for name, values in self._columns.items()}

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        make = self._make
        for batch in self._batches:
            self._columns = dict(
                zip(batch.schema.names, map(to_python, batch.columns), strict=True)
            )
            for at, values in enumerate(zip(*self._values(batch.num_rows), strict=True)):
                self._at = at
                try:
                    made = make(*values)
                except (RowError, ValueError, RecursionError) as error:
                    self._refuse(self.current, str(error))
                    continue
                yield made

    def _values(self, count: int) -> list[Sequence[Any]]:
        """The keys of all rows, and then the columns of the operation."""
        found, nulls = self._columns, [None] * count
        names = self._options.key_columns
        keys = [*zip(*(found[name] for name in names), strict=True)] if names else found["id"]
        return [keys, *(found.get(name, nulls) for name in self._names)]

    def _id(self, key: Any) -> str:
        id = key_id(key) if self._options.key_columns else key
        if not id:
            raise RowError("id is null or empty")
        return str(id)

    def _where(self, queue: str | None) -> str:
        queue = queue or self._queue
        if not queue:
            raise RowError("queue is null, and there is no option queue")
        allowed = self._options.queues
        if allowed and queue not in allowed:
            raise RowError(f"queue {queue!r} is not among the option queues: {', '.join(allowed)}")
        return queue

    def _call(
        self,
        key: Any,
        task: str | None,
        args: Any,
        kwargs: Any,
        eta: Any,
        countdown: Any,
        queue: str | None,
        priority: int | None,
        headers: Any,
        expires: Any,
    ) -> tuple[Any, ...]:
        if not task:
            raise RowError("task is null or empty")
        options: Row = {"task_id": self._id(key)}
        where = self._where(queue)
        if queue or self._options.queue:
            options["queue"] = where
        if priority is not None:
            options["priority"] = priority
        if expires is not None:
            options["expires"] = _expires(expires)
        if headers := _object("headers", headers):
            if "delayed_unique" in headers:
                raise RowError("header delayed_unique: unique tasks cannot be scheduled by a job")
            options["headers"] = headers
        _check_when(eta, countdown)
        if countdown is not None:
            options["countdown"] = float(countdown) if type(countdown) is Decimal else countdown
        return task, _list(args), _object("kwargs", kwargs), eta, options

    def _cancel(self, key: Any, queue: str | None) -> tuple[str, str, str, str]:
        return self._where(queue), self._id(key), "", ""

    def _move(
        self, key: Any, queue: str | None, eta: Any, countdown: Any
    ) -> tuple[str, str, str, str]:
        _check_when(eta, countdown)
        due_ms = _eta_ms(eta) if countdown is None else from_now_ms("countdown", float(countdown))
        return self._where(queue), self._id(key), str(due_ms), from_ms(due_ms).isoformat()


def _eta_ms(eta: Any) -> int:
    try:
        return max(0, eta_to_ms(eta))
    except (ValueError, OverflowError) as error:
        raise RowError(f"eta takes a time in ISO 8601, not {eta!r}"[:200]) from error


def _check_when(eta: Any, countdown: Any) -> None:
    if (eta is None) == (countdown is None):
        found = "neither eta nor countdown" if eta is None else "both eta and countdown"
        raise RowError(f"the row has {found}; for a task that is to run now, give countdown 0")


def _expires(value: Any) -> Any:
    if isinstance(value, Decimal):
        return float(value)
    if not isinstance(value, str):
        return value
    try:
        return parse_iso8601(value)
    except ValueError as error:
        raise RowError(f"expires takes a time in ISO 8601, not {value!r}"[:200]) from error


def _list(value: Any) -> Any:
    found = _loaded("args", value) if isinstance(value, str) else value
    if isinstance(found, dict):  # a struct: arguments of different types
        found = list(found.values()) if found is value else found
    if not isinstance(found, (list, type(None))):
        raise RowError(f"args takes a JSON list, not {value!r}"[:200])
    return found or []


def _object(name: str, value: Any) -> dict[str, Any]:
    found = _loaded(name, value) if isinstance(value, str) else value
    if not isinstance(found, (dict, type(None))):
        raise RowError(f"{name} takes a JSON object, not {value!r}"[:200])
    return found or {}


def _loaded(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowError(f"{name} is not JSON ({error}): {text!r}"[:200]) from error


def to_python(column: pyarrow.Array) -> list[Any]:
    """The values of a column: maps as dicts, timestamps as datetimes in UTC."""
    if pyarrow.types.is_timestamp(column.type):
        return [*map(_moment, column.cast(pyarrow.timestamp("us")).cast("int64").to_pylist())]
    values = _listed(column)
    convert = _converter(column.type)
    if convert is None:
        return values
    return [value if isinstance(value, Unreadable) else convert(value) for value in values]


class Unreadable(str):
    """What stands for a value that Python cannot hold, such as a date after the year 9999."""


def _listed(column: pyarrow.Array) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        return [_value(each) for each in column]
    return values


def _value(scalar: pyarrow.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return Unreadable(f"a value that Python cannot hold: {error}")


def _moment(since_us: int | None) -> datetime | str | None:
    """Arrow's own conversion takes three times as long, and makes a time that is slower to use."""
    if since_us is None:
        return None
    try:
        return EPOCH + timedelta(0, 0, since_us)
    except OverflowError:  # refused with the row, as what it is
        return f"{since_us} µs after 1970"


def _converter(type_: pyarrow.DataType) -> Callable[[Any], Any] | None:
    """What turns Arrow's lists of pairs into dicts, wherever they are in a value."""
    types = pyarrow.types
    if types.is_map(type_):
        inner = _converter(type_.item_type) or (lambda value: value)
        return lambda pairs: None if pairs is None else {key: inner(v) for key, v in pairs}
    if types.is_list(type_) or types.is_large_list(type_):
        each = _converter(type_.value_type)
        if each is None:
            return None
        return lambda items: None if items is None else [each(item) for item in items]
    if types.is_struct(type_):
        return _struct_converter({each.name: _converter(each.type) for each in type_})
    return None


def _struct_converter(
    members: dict[str, Callable[[Any], Any] | None],
) -> Callable[[Any], Any] | None:
    nested = {name: convert for name, convert in members.items() if convert is not None}
    if not nested:
        return None

    def convert(value: Any) -> Any:
        if value is None:
            return None
        return {**value, **{name: inner(value[name]) for name, inner in nested.items()}}

    return convert
