"""Converts the rows of a DataFrame to the arguments of bulk scheduling, or of a bulk change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime, timezone
from decimal import Decimal
from hashlib import sha1
from typing import Any, NamedTuple
from uuid import UUID

import pyarrow

from celery_ext.control.bulk.rows import Call, Pattern, RowError, Timed, check_time
from celery_ext.tasks.times import from_ms, from_now_ms
from kombu_delayed.message.envelope import eta_to_ms, parse_iso8601
from kombu_delayed.store.ledgers import CANCEL, RESCHEDULE, SCHEDULE

from ..arrow import Unreadable, iso_times, lists, slices, to_python
from ..options import WriteOptions
from .fitting import BARE_NUMBER, COLUMNS, extra_columns, fitted

Row = dict[str, Any]

#: Rarely used columns. A row with one of these is made by `Rows._call`.
_SELDOM = ("countdown", "headers", "expires")

#: The most patterns that are cached.
PATTERNS = 1_000

#: The UUID namespace of ids that are made from key columns.
NAMESPACE = UUID("6c1c2f0e-8d35-5f0e-9a53-6b1f6d1f3c7a")


class Carried(NamedTuple):
    """Values for the keyword arguments or headers of a row, from columns of other names."""

    extra: Row
    own: Any


class Rows:
    """Iterates over converted rows; invalid ones are given to `refuse` with a reason.

    To schedule, a row is what `control.bulk.schedule.schedule_many` takes; to cancel or reschedule,
    it is (queue, id, due, eta).
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
        #: The batch as it came, and the same with the types that rows need.
        self._given: pyarrow.RecordBatch = None
        self._batch: pyarrow.RecordBatch = None
        self._columns: dict[str, list[Any]] = {}
        self._patterns: dict[tuple[str | None, str | None, int | None], Pattern] = {}
        self._at = 0

    @property
    def current(self) -> Row:
        """The last row that was read, with all its original columns."""
        row = self._given.slice(self._at, 1)
        return {name: to_python(row.column(name))[0] for name in row.schema.names}

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in slices(self._batches):
            self._given, self._columns = batch, {}
            self._batch = fitted(batch, self._options)
            make, columns = self._plan()
            for self._at, values in enumerate(zip(*columns, strict=True)):
                try:
                    made = make(*values)
                except (RowError, ValueError, RecursionError) as error:
                    self._refuse(self.current, str(error))
                    continue
                yield made

    def _plan(self) -> tuple[Callable[..., tuple[Any, ...]], list[Sequence[Any]]]:
        """The function that converts a row of the batch, and the columns that it takes."""
        if self._options.operation == SCHEDULE and all(map(self._is_null, _SELDOM)):
            times = self._has("eta") and iso_times(self._batch.column("eta"))
            if times:
                columns = map(self._column, ("task", "kwargs", "queue", "priority"))
                args = lists(self._batch.column("args")) if self._has("args") else self._nulls
                return self._timed, [self._keys, args, *columns, *times]
        return self._make, [self._keys, *map(self._column, self._names)]

    def _has(self, name: str) -> bool:
        return name in self._batch.schema.names

    def _is_null(self, name: str) -> bool:
        if name == self._options.extra_columns and self._extra:
            return False
        return not self._has(name) or self._batch.column(name).null_count == self._batch.num_rows

    @property
    def _nulls(self) -> list[None]:
        return [None] * self._batch.num_rows

    def _column(self, name: str) -> list[Any]:
        """The values of a column of the batch; nulls if it has no such column."""
        if name not in self._columns:
            found = self._has(name)
            values = to_python(self._batch.column(name)) if found else self._nulls
            self._columns[name] = self._carrying(name, values)
        return self._columns[name]

    @property
    def _extra(self) -> list[str]:
        return extra_columns(self._given.schema.names, COLUMNS[SCHEDULE])

    def _carrying(self, name: str, values: list[Any]) -> list[Any]:
        """The values of a column, including those of unknown columns that are carried in it."""
        if name != self._options.extra_columns or not (names := self._extra):
            return values
        rows = zip(*(_as_written(self._given.column(each)) for each in names), strict=True)
        return [
            Carried(dict(zip(names, row, strict=True)), own)
            for row, own in zip(rows, values, strict=True)
        ]

    @property
    def _keys(self) -> list[Any]:
        if not (names := self._options.key_columns):
            return self._column("id")
        return [*zip(*(to_python(self._given.column(each)) for each in names), strict=True)]

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
        priority: Any,
        headers: Any,
        expires: Any,
    ) -> Call:
        task = _named(task)
        options: Row = {"task_id": self._id(key), **self._always(queue, priority)}
        if expires is not None:
            options["expires"] = _expires(expires)
        if headers is not None and (headers := _object("headers", headers)):
            if "delayed_unique" in headers:
                raise RowError("header delayed_unique: unique tasks cannot be scheduled by a job")
            options["headers"] = headers
        _check_when(eta, countdown)
        if countdown is not None:
            options["countdown"] = _number("countdown", countdown)
        else:
            options["eta"] = eta
        if type(eta) is not datetime:
            check_time(options)
        kwargs = {} if kwargs is None else _object("kwargs", kwargs)
        return Call(task, _list(args), kwargs, options)

    def _timed(
        self,
        key: Any,
        args: Any,
        task: str | None,
        kwargs: Any,
        queue: str | None,
        priority: int | None,
        eta: str,
        due: str,
    ) -> Timed:
        """Like `_call`, for a row with a time and without the rarely used columns."""
        kind = task, queue, priority
        pattern = self._patterns.get(kind) or self._pattern(*kind)
        kwargs = {} if kwargs is None else _object("kwargs", kwargs)
        if type(args) is not list:
            args = _list(args)
        return Timed(pattern, self._id(key), args, kwargs, eta, due)

    def _pattern(self, task: str | None, queue: str | None, priority: int | None) -> Pattern:
        if len(self._patterns) >= PATTERNS:
            self._patterns.clear()
        pattern = Pattern(_named(task), self._always(queue, priority))
        self._patterns[task, queue, priority] = pattern
        return pattern

    def _always(self, queue: str | None, priority: int | None) -> Row:
        where = self._where(queue)
        options: Row = {"queue": where} if queue or self._options.queue else {}
        if priority is not None:
            options["priority"] = priority if type(priority) is int else _whole(priority)
        return options

    def _cancel(self, key: Any, queue: str | None) -> tuple[str, str, str, str]:
        return self._where(queue), self._id(key), "", ""

    def _move(
        self, key: Any, queue: str | None, eta: Any, countdown: Any
    ) -> tuple[str, str, str, str]:
        _check_when(eta, countdown)
        if countdown is None:
            due_ms = _eta_ms(eta)
        else:
            due_ms = from_now_ms("countdown", float(_number("countdown", countdown)))
        return self._where(queue), self._id(key), str(due_ms), from_ms(due_ms).isoformat()


def key_id(values: Iterable[Any]) -> str:
    """The id for the values of key columns.

    Raises RowError if one is null, or NaN, which pandas uses for a missing number.
    """
    texts = [_key_text(value) for value in values]
    if None in texts:
        raise RowError("a key column is null, so that the row has no id")
    if unreadable := next((each for each in texts if isinstance(each, Unreadable)), None):
        raise RowError(f"a key column has {unreadable}")
    # Like uuid5, without its objects, which would double the time.
    text = sha1(NAMESPACE.bytes + json.dumps(texts).encode(), usedforsecurity=False).hexdigest()
    variant = "89ab"[int(text[16], 16) & 3]
    return f"{text[:8]}-{text[8:12]}-5{text[13:16]}-{variant}{text[17:20]}-{text[20:32]}"


def _key_text(value: Any) -> Any:
    if isinstance(value, datetime):
        return (value.astimezone(timezone.utc) if value.tzinfo else value).isoformat()
    if isinstance(value, date):
        return value.isoformat()
    if value is None or value != value:
        return None
    return value if isinstance(value, (str, int, float)) else str(value)


def _named(task: str | None) -> str:
    if not task:
        raise RowError("task is null or empty")
    return task


def _whole(priority: Any) -> int:
    """A priority as an integer. Files with missing values store integers as floats."""
    number = _number("priority", priority)
    if number % 1 != 0:  # also infinity and NaN, which `int` refuses with other errors
        raise RowError(f"priority takes a whole number, not {priority}")
    return int(number)


def _number(name: str, value: Any) -> float:
    """A number from a column of any type; text files have it as text."""
    try:
        return value if isinstance(value, (int, float)) else float(value)
    except ValueError as error:
        raise RowError(f"{name} takes a number, not {value!r}"[:200]) from error


def _as_written(column: pyarrow.Array) -> list[Any]:
    """The values of a column for a task. Times without a zone stay without one."""
    values = to_python(column)
    if not pyarrow.types.is_timestamp(column.type):
        return values
    return [_as_time(each, column.type.tz is None) for each in values]


def _as_time(value: datetime | str | None, is_local: bool) -> Any:
    if isinstance(value, str):
        return Unreadable(f"a time that Python cannot hold: {value}")
    return value.replace(tzinfo=None) if value is not None and is_local else value


def _eta_ms(eta: Any) -> int:
    try:
        return max(0, eta_to_ms(eta))
    except (ValueError, OverflowError) as error:
        raise RowError(f"eta takes a time in ISO 8601, not {eta!r}"[:200]) from error


def _check_when(eta: Any, countdown: Any) -> None:
    if isinstance(eta, str) and BARE_NUMBER.fullmatch(eta):  # ISO 8601 would read a year
        raise RowError(f"eta takes a time in ISO 8601, not {eta!r}: seconds are a countdown")
    if (eta is None) == (countdown is None):
        found = "neither eta nor countdown" if eta is None else "both eta and countdown"
        raise RowError(f"the row has {found}; for a task that is to run now, give countdown 0")


def _expires(value: Any) -> Any:
    found = float(value) if isinstance(value, Decimal) else value
    if isinstance(value, str):
        try:
            found = float(value) if BARE_NUMBER.fullmatch(value) else parse_iso8601(value)
        except ValueError as error:
            raise RowError(
                f"expires takes seconds or a time in ISO 8601, not {value!r}"[:200]
            ) from error
    if isinstance(found, (int, float)):
        from_now_ms("expires", found)
    return found


def _list(value: Any) -> Any:
    found = _loaded("args", value) if isinstance(value, str) else value
    if isinstance(found, dict):  # a struct: arguments of different types
        found = list(found.values()) if found is value else found
    if not isinstance(found, (list, type(None))):
        raise RowError(f"args takes a JSON list, not {value!r}"[:200])
    return found or []


def _object(name: str, value: Any) -> dict[str, Any]:
    if type(value) is Carried:
        return {**_readable(value.extra), **_object(name, value.own)}
    found = _loaded(name, value) if isinstance(value, str) else value
    if not isinstance(found, (dict, type(None))):
        raise RowError(f"{name} takes a JSON object, not {value!r}"[:200])
    return found or {}


def _readable(row: Row) -> Row:
    for name, value in row.items():
        if isinstance(value, Unreadable):
            raise RowError(f"column {name} has {value}")
    return row


def _loaded(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{name} is not JSON ({error}): {text!r}"[:200]) from error
