"""Files of rows to schedule, cancel or reschedule, with columns of the types these take."""

from __future__ import annotations

from pathlib import PurePath

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DataType, DoubleType, IntegerType, StringType, StructField, StructType

from kombu_delayed.errors import OptionError

FORMATS = ("parquet", "json", "csv")

_SUFFIXES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}

#: What is not text in a file of text. Arguments stay the JSON that they are: types that Spark finds
#: would give each row all the members that any other one has.
_TYPES: dict[str, DataType] = {
    **dict.fromkeys(("id", "task", "args", "kwargs", "eta", "queue", "headers"), StringType()),
    "countdown": DoubleType(),
    "priority": IntegerType(),
}


def read_rows(spark: SparkSession, path: str, format: str | None = None) -> DataFrame:
    """The rows of Parquet files, of JSON lines, or of CSV with a header; of a file or a directory.

    Without a `format`, by the path's suffix. Raises OptionError, and what Spark raises for files
    that are not there or not of this format.
    """
    format = format or format_of(path)
    if format == "parquet":
        return spark.read.parquet(path)
    reader = spark.read.option("mode", "FAILFAST")
    if format == "csv":
        rows = reader.option("header", "true").option("escape", '"').csv(path)
        numbers = {name: type_ for name, type_ in _TYPES.items() if type_ != StringType()}
        casts = {name: rows[name].cast(numbers[name]) for name in rows.columns if name in numbers}
        return rows.withColumns(casts)
    # Where Spark looks for names and types, an error would not be one of its own.
    found = spark.read.option("mode", "DROPMALFORMED").json(path).schema
    types = [StructField(each.name, _TYPES.get(each.name, each.dataType)) for each in found]
    return reader.schema(StructType(types)).json(path)


def format_of(path: str) -> str:
    """The format that a path's suffix names. Raises OptionError where it names none."""
    suffixes = PurePath(path).suffixes
    for suffix in reversed(suffixes):
        if suffix in _SUFFIXES:
            return _SUFFIXES[suffix]
    raise OptionError(
        f"{path} does not end in {', '.join(_SUFFIXES)}: name the format, {' or '.join(FORMATS)}"
    )
