"""Files of rows to schedule, cancel or reschedule, with columns of the types these take."""

from __future__ import annotations

import re
from pathlib import PurePath

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
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
        return _parquet(spark, path)
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


def _parquet(spark: SparkSession, path: str) -> DataFrame:
    """Parquet files, also with times in nanoseconds, as pandas 2 writes them and Spark refuses."""
    try:
        return spark.read.parquet(path)
    except AnalysisException as error:
        if error.getCondition() != "PARQUET_TYPE_ILLEGAL" or "NANOS" not in str(error):
            raise
    spark.conf.set("spark.sql.legacy.parquet.nanosAsLong", "true")  # also while they are read
    rows = spark.read.parquet(path)
    found = _NANOSECONDS.findall(_parquet_schema(spark, rows.inputFiles()[0]))
    return rows.withColumns({name: _of_nanoseconds(name, utc == "true") for name, utc in found})


#: Of the text of a schema as Parquet's own library writes it.
_NANOSECONDS = re.compile(r"int64 (\S+) \(TIMESTAMP\(NANOS,(true|false)\)\)")


def _parquet_schema(spark: SparkSession, file: str) -> str:
    jvm, conf = spark._jvm, spark._jsc.hadoopConfiguration()
    parquet = jvm.org.apache.parquet.hadoop
    path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI.create(file))
    reader = parquet.ParquetFileReader.open(parquet.util.HadoopInputFile.fromPath(path, conf))
    try:
        return str(reader.getFileMetaData().getSchema().toString())
    finally:
        reader.close()


def _of_nanoseconds(name: str, is_instant: bool) -> Column:
    quoted = f"`{name}` div 1000"
    if is_instant:
        return F.expr(f"timestamp_micros({quoted})")
    seconds = f"CAST(({quoted}) / CAST(1000000 AS DECIMAL(7, 0)) AS DECIMAL(18, 6))"
    return F.expr(f"TIMESTAMP_NTZ '1970-01-01 00:00:00' + make_dt_interval(0, 0, 0, {seconds})")


def queried(rows: DataFrame, query: str) -> DataFrame:
    """What a query makes of rows, which it knows as the table `rows`."""
    rows.createOrReplaceTempView("rows")
    try:
        return rows.sparkSession.sql(query)
    finally:
        rows.sparkSession.catalog.dropTempView("rows")


def format_of(path: str) -> str:
    """The format that a path's suffix names. Raises OptionError where it names none."""
    suffixes = PurePath(path).suffixes
    for suffix in reversed(suffixes):
        if suffix in _SUFFIXES:
            return _SUFFIXES[suffix]
    raise OptionError(
        f"{path} does not end in {', '.join(_SUFFIXES)}: name the format, {' or '.join(FORMATS)}"
    )
