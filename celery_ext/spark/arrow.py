"""Columns of record batches as Python values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pyarrow
import pyarrow.compute as compute
from pyarrow import types

from celery_ext.tasks.times import EPOCH, LATEST_MS

#: Record batches are read in slices of about this many bytes.
SLICE_BYTES = 8_000_000


def slices(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """The same rows in batches that are small enough to be held as Python values."""
    for batch in batches:
        rows = max(1, batch.num_rows * SLICE_BYTES // max(batch.nbytes, 1))
        for at in range(0, batch.num_rows, rows):
            yield batch.slice(at, rows)


def iso_times(column: pyarrow.Array) -> tuple[list[str], list[str]] | None:
    """Timestamps as `datetime.isoformat` writes them in UTC, and in ms since the epoch, rounded up.

    None for a column with nulls, with times that a datetime cannot hold, or of another type.
    """
    if not types.is_timestamp(column.type) or column.null_count or not len(column):
        return None
    times = column.cast(pyarrow.timestamp("us"))
    since_us = times.cast("int64")
    bounds = compute.min_max(since_us).as_py()
    if bounds["min"] < 0 or bounds["max"] > LATEST_MS * 1000:
        return None
    texts = compute.replace_substring(times.cast("string"), " ", "T", max_replacements=1)
    texts = compute.replace_substring(texts, ".000000", "")
    texts = compute.binary_join_element_wise(texts, "+00:00", "")
    due = compute.divide(compute.add(since_us, 999), 1000).cast("string")
    return texts.to_pylist(), due.to_pylist()


def lists(column: pyarrow.Array) -> list[Any]:
    """The values of a column, those of a struct as lists: arguments of different types."""
    type_ = column.type
    if not types.is_struct(type_):
        return to_python(column)
    if type_.num_fields and not column.null_count and all(_is_plain(each.type) for each in type_):
        return [*map(list, zip(*map(to_python, column.flatten()), strict=True))]
    return [list(each.values()) if type(each) is dict else each for each in to_python(column)]


def _is_plain(type_: pyarrow.DataType) -> bool:
    return bool(types.is_string(type_) or types.is_integer(type_) or types.is_floating(type_))


def to_python(column: pyarrow.Array) -> list[Any]:
    """The values of a column: maps as dicts, timestamps as datetimes in UTC."""
    if types.is_timestamp(column.type):
        return [*map(_moment, column.cast(pyarrow.timestamp("us")).cast("int64").to_pylist())]
    values = _listed(column)
    convert = _converter(column.type)
    if convert is None:
        return values
    return [value if isinstance(value, Unreadable) else convert(value) for value in values]


class Unreadable(str):
    """A placeholder for a value that Python cannot hold, such as a date after the year 9999."""


def _in_utc(type_: pyarrow.DataType) -> pyarrow.DataType:
    """A type whose instants are in UTC: Python may not know the zone of Spark's session."""
    if types.is_timestamp(type_) and type_.tz is not None:
        return pyarrow.timestamp("us", "UTC")
    if types.is_map(type_):
        return pyarrow.map_(type_.key_type, _in_utc(type_.item_type))
    if types.is_list(type_):
        return pyarrow.list_(_in_utc(type_.value_type))
    if types.is_large_list(type_):
        return pyarrow.large_list(_in_utc(type_.value_type))
    if types.is_struct(type_):
        return pyarrow.struct([(each.name, _in_utc(each.type)) for each in type_])
    return type_


def _listed(column: pyarrow.Array) -> list[Any]:
    type_ = _in_utc(column.type)
    if type_ != column.type:
        column = column.cast(type_)
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
    """Convert a time. Arrow's conversion takes three times as long, and its result is slower."""
    if since_us is None:
        return None
    try:
        return EPOCH + timedelta(0, 0, since_us)
    except OverflowError:  # refused with its row
        return f"{since_us} µs after 1970"


def _converter(type_: pyarrow.DataType) -> Callable[[Any], Any] | None:
    """A function that turns Arrow's lists of pairs into dicts, at any depth of a value."""
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
