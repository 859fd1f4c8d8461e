"""Reads files of rows to schedule, cancel or reschedule, and fits the types of their columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from pathlib import PurePath
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from kombu_delayed.errors import OptionError

from ..sink.fitting import NUMBERS

FORMATS = ("parquet", "json", "csv")

_GUESS_TYPES = "spark.sql.sources.partitionColumnTypeInference.enabled"

_SUFFIXES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}

#: These columns are read as text, so that an invalid value is refused with its row. Arguments stay
#: JSON, because the types that Spark infers would give each row the members of all other rows.
_TEXTS = frozenset(
    {
        *("id", "task", "args", "kwargs", "eta", "countdown", "queue", "priority", "headers"),
        "expires",
    }
)

#: Of these, the columns that cannot have numbers.
_NO_NUMBERS = _TEXTS - {"id", *NUMBERS}


def read_rows(spark: SparkSession, path: str, format: str | None = None) -> DataFrame:
    """The rows of a file or directory: Parquet, JSON lines, or CSV with a header.

    Without a `format`, the path's suffix decides. Raises OptionError, and Spark's errors for files
    that are missing or of another format.
    """
    format = format or format_of(path)
    before = spark.conf.get(_GUESS_TYPES)
    spark.conf.set(_GUESS_TYPES, "false")  # directories such as id=0017 stay text
    try:
        rows = _rows(spark, path, format)
    except AnalysisException as error:
        if error.getCondition() in _UNREADABLE:
            raise OptionError(_unreadable(spark, path, str(error))) from error
        if error.getCondition() != "UNABLE_TO_INFER_SCHEMA":
            raise
        rows = None
    finally:
        spark.conf.set(_GUESS_TYPES, before)
    if rows is None or not rows.columns:
        raise OptionError(
            f"{path} has no rows: there is no {format} file, or it is empty, or of another format"
        )
    return rows


def _rows(spark: SparkSession, path: str, format: str) -> DataFrame:
    if format == "parquet":
        return _parquet(spark, path)
    reader = spark.read.option("mode", "FAILFAST")
    if format == "csv":
        # A file with other columns than the first is an error. Spark would match by position.
        reader = reader.option("header", "true").option("enforceSchema", "false")
        # Quoted text may have line breaks. All columns of a line are checked, even unused ones.
        reader = reader.option("multiLine", "true").option("columnPruning", "false")
        return _without_index(reader.option("escape", '"'), path)
    # While Spark infers names and types, its error for damaged JSON would be a different one.
    found = spark.read.option("mode", "DROPMALFORMED").json(path).schema
    text = StringType()
    types = [
        StructField(each.name, text if each.name in _TEXTS else each.dataType) for each in found
    ]
    return reader.schema(StructType(types)).json(path)


def _without_index(reader: DataFrameReader, path: str) -> DataFrame:
    """CSV files without pandas' index, which is a first column without a name."""
    found = reader.csv(path)
    if found.columns[:1] != ["_c0"]:  # Spark's name for it, which it then misses in the file
        return found
    unnamed, *named = found.schema
    types = [StructField("", unnamed.dataType), *named]
    return reader.schema(StructType(types)).csv(path).drop("")


def _parquet(spark: SparkSession, path: str) -> DataFrame:
    """Parquet files, including times in nanoseconds, which pandas 2 writes and Spark refuses."""
    try:
        rows = spark.read.parquet(path)
    except AnalysisException as error:
        if "(TIMESTAMP(NANOS," not in str(error):
            raise
        spark.conf.set(_NANOS_AS_LONG, "true")  # needed while they are read, too
        return _parquet(spark, path)
    files = rows.inputFiles()
    if not files:
        return rows
    types = _parquet_types(spark, files[0])
    empty = {name: F.lit(None).cast("string") for name in _without_values(types) & _NO_NUMBERS}
    casts = {}
    if spark.conf.get(_NANOS_AS_LONG, "false") == "true":
        times = _nanoseconds(types)
        for file in files[1:MOST_FILES]:
            if (others := _nanoseconds(_parquet_types(spark, file))) != times:
                raise OptionError(_mixed(files[0], times, file, others))
        casts = {name: _of_nanoseconds(name, is_utc) for name, is_utc in times.items()}
    if len(files) == 1:
        return rows.withColumns(empty | casts)
    try:
        return _merged(spark, path).withColumns(empty | casts)
    except OptionError:
        if (rows := _joined(spark, path, files)) is None:
            raise
        return rows.withColumns(casts)


#: Spark's errors for columns that it cannot read. That for times does not have Parquet's name of
#: their type.
_TIME = "UNSUPPORTED_TIME_TYPE"
_UNREADABLE = ("PARQUET_TYPE_ILLEGAL", "PARQUET_TYPE_NOT_SUPPORTED", _TIME)


def _unreadable(spark: SparkSession, path: str, said: str) -> str:
    """The error for a column of a type that Spark cannot read, such as a UUID of DuckDB."""
    is_time = _TIME in said
    for file in spark.read.format("binaryFile").load(path).inputFiles()[:MOST_FILES]:
        for names, type_ in _parquet_types(spark, file).items():
            if f"({type_})" in said or (is_time and type_.startswith("TIME(")):
                return (
                    f"column {'.'.join(names)} of {file} has the type {type_}, which Spark cannot "
                    "read: write it as text, in DuckDB with CAST(… AS VARCHAR)"
                )
    return said


def _merged(spark: SparkSession, path: str, *files: str) -> DataFrame:
    """Files with the columns of all of them. Spark would use the columns of one file.

    Reads all files of the path, or some of them.
    """
    reader = spark.read.option("mergeSchema", "true")
    try:
        return reader.option("basePath", path).parquet(*files) if files else reader.parquet(path)
    except Py4JJavaError as error:
        said = str(error.java_exception.getMessage())
        if "CANNOT_MERGE_SCHEMAS" not in said:
            raise
        raise OptionError(
            f"a column has different types in the files at {path}: schedule them one by one. {said}"
        ) from error


def _joined(spark: SparkSession, path: str, files: Sequence[str]) -> DataFrame | None:
    """As `_merged`, where a column has values in some files only; None if that does not help.

    In the others, pandas and Arrow write it with a type that does not fit.
    """
    names = [unquote(file) for file in files]
    if len(files) > MOST_FILES or any(map(_GLOB.search, [path, *names])):
        return None
    groups: dict[frozenset[str], list[str]] = {}
    for file, name in zip(files, names, strict=True):
        groups.setdefault(_without_values(_parquet_types(spark, file)), []).append(name)
    if len(groups) == 1:
        return None
    parts = [_merged(spark, path, *some).drop(*empty) for empty, some in groups.items()]
    return reduce(partial(DataFrame.unionByName, allowMissingColumns=True), parts)


#: Characters with a meaning in Hadoop's patterns for paths.
_GLOB = re.compile(r"[*?\[{\\]")

_NANOS_AS_LONG = "spark.sql.legacy.parquet.nanosAsLong"

#: The most files whose types are compared.
MOST_FILES = 1_000

#: The name of a column, or the names that lead to a nested one.
_Path = tuple[str, ...]

#: The types that pandas and Arrow write for a column without values. Spark reads numbers.
_NOTHING = ("UNKNOWN", "NULL")


def _without_values(types: Mapping[_Path, str]) -> frozenset[str]:
    return frozenset(
        name for (name, *rest), type_ in types.items() if type_ in _NOTHING and not rest
    )


_NANOSECONDS = {"TIMESTAMP(NANOS,true)": True, "TIMESTAMP(NANOS,false)": False}


def _nanoseconds(types: Mapping[_Path, str]) -> dict[str, bool]:
    """The columns with times in nanoseconds, and whether these are in UTC.

    Raises OptionError for a nested one, which Spark cannot convert.
    """
    found = {path: _NANOSECONDS[type_] for path, type_ in types.items() if type_ in _NANOSECONDS}
    for path in found:
        if len(path) > 1:
            raise OptionError(
                f"column {'.'.join(path)} has times in nanoseconds within another column, which "
                "Spark cannot read: write them in microseconds, with pandas "
                "to_parquet(…, coerce_timestamps='us')"
            )
    return {name: is_utc for (name,), is_utc in found.items()}


def _mixed(first: str, times: Mapping[str, bool], file: str, others: Mapping[str, bool]) -> str:
    name, _ = min(times.items() ^ others.items())
    return (
        f"column {name} has times in nanoseconds in only one of {first} and {file}, or with "
        "another zone: schedule the files one by one"
    )


def _parquet_types(spark: SparkSession, file: str) -> dict[_Path, str]:
    """The logical type of each column, according to Parquet's own library."""
    jvm, conf = spark._jvm, spark._jsc.hadoopConfiguration()
    parquet = jvm.org.apache.parquet.hadoop
    path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI.create(file))
    reader = parquet.ParquetFileReader.open(parquet.util.HadoopInputFile.fromPath(path, conf))
    try:
        columns = reader.getFileMetaData().getSchema().getColumns()
        return {
            tuple(each.getPath()): str(each.getPrimitiveType().getLogicalTypeAnnotation())
            for each in columns
        }
    finally:
        reader.close()


def _of_nanoseconds(name: str, is_instant: bool) -> Column:
    quoted = f"`{name.replace('`', '``')}` div 1000"
    if is_instant:
        return F.expr(f"timestamp_micros({quoted})")
    seconds = f"CAST(({quoted}) / CAST(1000000 AS DECIMAL(7, 0)) AS DECIMAL(18, 6))"
    return F.expr(f"TIMESTAMP_NTZ '1970-01-01 00:00:00' + make_dt_interval(0, 0, 0, {seconds})")


def queried(rows: DataFrame, query: str) -> DataFrame:
    """The result of a query on the rows, which it knows as the table `rows`."""
    rows.createOrReplaceTempView("rows")
    try:
        return rows.sparkSession.sql(query)
    finally:
        rows.sparkSession.catalog.dropTempView("rows")


def format_of(path: str) -> str:
    """The format of a path's suffix. Raises OptionError for an unknown suffix."""
    suffixes = PurePath(path).suffixes
    for suffix in reversed(suffixes):
        if suffix in _SUFFIXES:
            return _SUFFIXES[suffix]
    raise OptionError(
        f"{path} does not end in {', '.join(_SUFFIXES)}: name the format, {' or '.join(FORMATS)}"
    )
