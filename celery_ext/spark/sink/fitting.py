"""Converts the columns of a data lake's files to the types that messages need.

Files of pandas, Polars or DuckDB have times without a zone, dates, numeric ids, and NaN for missing
numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, time, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow
import pyarrow.compute as compute
from pyarrow import types

from celery_ext.app.settings import suggestion
from celery_ext.tasks.body import CELERY_HEADERS
from kombu_delayed.errors import OptionError
from kombu_delayed.message.envelope import parse_iso8601
from kombu_delayed.store.ledgers import CANCEL, RESCHEDULE, SCHEDULE

from ..options import FAIL, HEADERS, KWARGS, WriteOptions

_NUMBER = r"tinyint|smallint|int|bigint|float|double|decimal\(.*\)"
_WHOLE = "tinyint|smallint|int|bigint"
_TIME = "timestamp|timestamp_ntz|date|string"

#: Columns with the Spark types that they may have.
_TYPES = {
    "id": rf"string|{_WHOLE}|decimal\(\d+,0\)",
    "task": "string",
    "args": "string|array<.*>|struct<.*>",
    "kwargs": r"string|map<string,.*>|struct<.*>",
    "eta": _TIME,
    "countdown": f"{_NUMBER}|string",
    "queue": "string",
    "priority": f"{_NUMBER}|string",
    "headers": "string|map<string,.*>|struct<.*>",
    "expires": f"{_TIME}|{_NUMBER}",
}
COLUMNS = {
    SCHEDULE: tuple(_TYPES),
    CANCEL: ("id", "queue"),
    RESCHEDULE: ("id", "queue", "eta", "countdown"),
}

#: A column, or a part of one, of this type, but not a member with this name.
_VARIANT = re.compile(r"(^|[:<,] ?)variant($|[>,])")

#: The same for a type that Arrow cannot give to Python, even if the column is left out.
_MONTHS = re.compile(r"(^|[:<,] ?)interval (year|month)( to month)?($|[>,])")

#: Columns with times, and those with numbers that may be missing.
TIMES, NUMBERS = ("eta", "expires"), ("countdown", "expires", "priority")

#: An ISO 8601 date without a time.
_DAY_LENGTH = len("2026-12-01")

#: A text that is a number of seconds, or a year in ISO 8601. Eight digits may be a date.
BARE_NUMBER = re.compile(r"\s*(\d{1,7}|\d{9,}|\d+\.\d*)\s*")

_DAY_US, _QUARTER_US = 86_400_000_000, 900_000_000

#: Dates that are further from 1970 are refused. Arrow would multiply them to a time of our days.
_FAR_DAYS = 100_000_000

_LOCAL, _INSTANT = pyarrow.timestamp("us"), pyarrow.timestamp("us", "UTC")

#: Columns of this name are the index of a pandas DataFrame.
_INDEX = "__index_level_"


def extra_columns(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """The columns that are not ours, without the index that pandas writes."""
    return [name for name in names if name not in known and not name.startswith(_INDEX)]


def check_columns(types: Mapping[str, str], options: WriteOptions) -> None:
    """Check a DataFrame's columns, given with their Spark types, before any task runs.

    Raises OptionError, with the column and the allowed types.
    """
    operation, keys = options.operation, options.key_columns
    known = COLUMNS[operation]
    extra = extra_columns([*types], (*known, *keys))
    if extra and options.extra_columns == FAIL:
        shown = ", ".join(map(repr, extra))
        raise OptionError(
            f"{operation} knows no column {shown}{suggestion(extra[0], known, 'it takes')}"
        )
    if operation != SCHEDULE and options.extra_columns in (KWARGS, HEADERS):
        raise OptionError(f"option extra_columns={options.extra_columns} is for schedule only")
    for name, type_ in types.items():
        if _VARIANT.search(type_):
            raise OptionError(f"column {name} is of type {type_}: convert variants with to_json")
        if _MONTHS.search(type_):
            raise OptionError(
                f"column {name} is of type {type_}: leave it out, or convert it to a string or a "
                "number of months"
            )
    # Columns of keys become headers, too.
    carried = extra_columns([*types], known) if options.extra_columns == HEADERS else ()
    for name in sorted(CELERY_HEADERS.intersection(carried)):
        raise OptionError(
            f"column {name!r} would replace the header that Celery has under this name: rename it, "
            "or set extra_columns=drop"
        )
    for name in set(types) & set(known) - set(keys):
        if types[name] != "void" and not re.fullmatch(_TYPES[name], types[name]):
            raise OptionError(f"column {name} cannot be of type {types[name]}{_hint(name)}")
    for missing in (name for name in keys if name not in types):
        raise OptionError(f"option key_columns names {missing!r}, which is not a column")
    _check_needed(types, options)


def _hint(name: str) -> str:
    shown = _TYPES[name].replace("\\d+,0", "…,0").replace("|", ", ").replace(".*", "…")
    return f", but only {shown.replace(chr(92), '')}"


def _check_needed(types: Mapping[str, str], options: WriteOptions) -> None:
    operation = options.operation
    if ("id" in types) == bool(options.key_columns):
        near = "" if "id" in types else suggestion("id", [*types], "there are")
        raise OptionError(
            "give either a column id or the option key_columns, from which ids are made: a row "
            "must have the same id each time, or a task of Spark that is run again would "
            f"{operation} it again{near}"
        )
    if operation == SCHEDULE and "task" not in types:
        raise OptionError(
            "there is no column task, the name of the task of each row"
            f"{suggestion('task', [*types], 'there are')}"
        )
    if operation != SCHEDULE and "queue" not in types and not options.queue:
        raise OptionError(f"{operation} needs a column queue or the option queue")
    if operation != CANCEL and not {"eta", "countdown"} & set(types):
        raise OptionError(f"{operation} needs a column eta or countdown: when it is due")


def fitted(batch: pyarrow.RecordBatch, options: WriteOptions) -> pyarrow.RecordBatch:
    """The same rows: ids as texts, times as instants, and nulls where a number is missing."""
    for at, name in enumerate(batch.schema.names):
        column = batch.column(at)
        if name == "id" and not types.is_string(column.type):
            made = column.cast("string")
        elif name in TIMES and _is_local(column.type, options):
            made = _instants(column, options)
        elif name in NUMBERS and types.is_floating(column.type):
            made = compute.if_else(
                compute.is_nan(column), pyarrow.scalar(None, column.type), column
            )
        else:
            continue
        batch = batch.set_column(at, name, made)
    return batch


def _is_local(type_: pyarrow.DataType, options: WriteOptions) -> bool:
    if _is_text(type_):
        return options.time_zone.key != "UTC" or options.time_of_day != time(0)
    return types.is_date(type_) or (types.is_timestamp(type_) and type_.tz is None)


def _is_text(type_: pyarrow.DataType) -> bool:
    # Large if the session has spark.sql.execution.arrow.useLargeVarTypes.
    return bool(types.is_string(type_) or types.is_large_string(type_))


def _instants(column: pyarrow.Array, options: WriteOptions) -> pyarrow.Array:
    if _is_text(column.type):
        return pyarrow.array([_read(text, options) for text in column.to_pylist()], "string")
    if types.is_date(column.type):
        days = column.cast("date32").cast("int32").cast("int64")
        days = compute.min_element_wise(days, _FAR_DAYS, skip_nulls=False)
        days = compute.max_element_wise(days, -_FAR_DAYS, skip_nulls=False)
        since_us = compute.multiply(days, _DAY_US)
        column = compute.add(since_us, _of_day_us(options.time_of_day)).cast(_LOCAL)
    return _zoned(column.cast(_LOCAL), options.time_zone)


def _of_day_us(of_day: time) -> int:
    seconds = (of_day.hour * 60 + of_day.minute) * 60 + of_day.second
    return seconds * 1_000_000 + of_day.microsecond


def _zoned(local: pyarrow.Array, zone: ZoneInfo) -> pyarrow.Array:
    """Local times as instants. An ambiguous time is the first of two; a skipped hour is added.

    Arrow cannot do this, because it knows no daylight saving time after 2037.
    """
    since_us = local.cast("int64")
    quarters = compute.divide(since_us, _QUARTER_US).dictionary_encode()
    offsets = pyarrow.array([_offset_us(each, zone) for each in quarters.dictionary.to_pylist()])
    if not len(offsets):  # nothing but nulls
        return local.cast(_INSTANT)
    return compute.subtract(since_us, offsets.take(quarters.indices)).cast(_INSTANT)


def _offset_us(quarter: int, zone: ZoneInfo) -> int:
    """The UTC offset of a zone, which only changes at full quarters of an hour."""
    try:
        moment = datetime(1970, 1, 1) + timedelta(minutes=15 * quarter)
    except OverflowError:  # refused with its row
        return 0
    offset = moment.replace(tzinfo=zone).utcoffset() or timedelta(0)
    return offset // timedelta(microseconds=1)


def _read(text: str | None, options: WriteOptions) -> Any:
    """A time as text with its zone. An invalid value stays, and is refused with its row."""
    if text and BARE_NUMBER.fullmatch(text):
        return text
    try:
        moment = parse_iso8601(text) if text else None
    except ValueError:
        return text
    if moment is None or moment.tzinfo is not None:
        return text
    if len(text or "") <= _DAY_LENGTH:
        moment = datetime.combine(moment.date(), options.time_of_day)
    try:
        return moment.replace(tzinfo=options.time_zone).astimezone(timezone.utc).isoformat()
    except OverflowError:
        return text
