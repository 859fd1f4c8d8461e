"""A job whose refused rows are written by Spark, to any file system that it supports.

The Python processes that write to the broker only have the local file system. So they return the
refused rows as rows of a DataFrame, which Spark writes and commits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from ..events.archive_files import exists
from ..options import WriteOptions
from .write import BacklogWriter, Written

#: Refused rows that are returned together.
_LINES = 1_000

#: A refused row as a line of JSON, or what a task has done.
_SCHEMA = "line string, written string"


def write_rejecting(df: DataFrame, options: WriteOptions) -> None:
    """Process each row as the options say, and write the refused ones to the directory `rejects`.

    Raises OptionError, and Spark's errors if tasks fail.
    """
    exists(df.sparkSession, options.rejects)  # an unknown file system fails here
    with TemporaryDirectory() as unused:
        writer = BacklogWriter(replace(options, rejects=unused), df.schema)
    writer.begin()
    try:
        written = _process(df, writer, options.rejects)
        writer.options = replace(options, rejects="")
        writer.commit([*written])
    except BaseException:
        writer.options = replace(options, rejects="")
        writer.abort([])
        raise


def _process(df: DataFrame, writer: BacklogWriter, rejects: str) -> list[Written]:
    # Kept, as writing them must not run the tasks for a second time.
    done = _mapped(df, _Refusing(writer)).persist()
    try:
        rows = done.where("written is not null").select("written").collect()
        written = [Written(**json.loads(row.written)) for row in rows]
        if any(each.refused for each in written):
            lines = done.where(F.col("line").isNotNull()).select("line")
            lines.write.mode("append").text(rejects)
        return written
    finally:
        done.unpersist()


def _mapped(df: DataFrame, function: _Refusing) -> DataFrame:
    """Like `mapInArrow`, which requires pandas although it does not use it."""
    if find_spec("pandas"):
        return df.mapInArrow(function, _SCHEMA)
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

    kind = PythonEvalType.SQL_MAP_ARROW_ITER_UDF
    udf = UserDefinedFunction(function, returnType=_SCHEMA, evalType=kind)
    names = (name.replace("`", "``") for name in df.columns)
    column: Any = udf(*(df[f"`{name}`"] for name in names))
    made: Any = df
    return ClassicDataFrame(made._jdf.mapInArrow(column._jc, False, None), made.sparkSession)


class _Refusing:
    """The function that each Spark task runs; yields the refused rows, then its result."""

    def __init__(self, writer: BacklogWriter) -> None:
        self.writer = writer

    def __call__(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        # In a directory of Spark, which deletes it even if this process is killed.
        place = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or None
        with TemporaryDirectory(prefix="kombu-delayed-rejects-", dir=place) as directory:
            self.writer.options = replace(self.writer.options, rejects=directory)
            written = self.writer.write(batches)
            if written.rejects:
                with Path(directory, written.rejects).open(encoding="utf-8") as file:
                    while lines := [line.rstrip("\n") for line in islice(file, _LINES)]:
                        yield _batch(lines, [None] * len(lines))
        yield _batch([None], [json.dumps(asdict(replace(written, rejects="")))])


def _batch(lines: list[str] | list[None], written: list[str] | list[None]) -> pyarrow.RecordBatch:
    arrays = [pyarrow.array(values, pyarrow.string()) for values in (lines, written)]
    return pyarrow.RecordBatch.from_arrays(arrays, names=["line", "written"])
