"""Rows as a data lake has them: files of pandas, Polars, DuckDB, pyarrow and Spark itself."""

from __future__ import annotations

import base64
import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis
from kombu.utils.json import loads
from pyarrow import parquet
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from celery_ext.spark import cancel, schedule
from celery_ext.spark.commands.files import read_rows
from kombu_delayed.errors import OptionError
from kombu_delayed.message.envelope import eta_to_ms
from tests.kit.backlog import check_backlog, records
from tests.kit.spark import Run, counts

pytestmark = pytest.mark.thorough

#: Each file has the rows that `files/make.py` writes; Spark's file is written by this test.
FILES = Path(__file__).parent / "files"
WRITERS = ("pandas2", "pandas3", "polars", "duckdb", "pyarrow", "spark")

NANOS_AS_LONG = "spark.sql.legacy.parquet.nanosAsLong"

#: A double could not represent this number.
FIRST = "9007199254740993"

EXTRA = ["day", "amount", "email"]
KWARGS: dict[str, Any] = {
    FIRST: {"day": date(2100, 7, 1), "amount": Decimal("12.50"), "email": "ann@example.com"},
    "2": {"day": date(2100, 1, 1), "amount": Decimal("0.10"), "email": None},
}

#: 09:30 in Berlin, in summer and in winter.
DUE = {FIRST: eta_to_ms("2100-07-01T07:30:00Z"), "2": eta_to_ms("2100-01-01T08:30:00Z")}


def messages(client: redis.Redis) -> dict[str, Any]:
    found = records(client, "celery")
    return {id: json.loads(record[record.index("{") :]) for id, record in found.items()}


def kwargs(client: redis.Redis) -> dict[str, Any]:
    """The keyword arguments of each task by its id, as read by workers."""
    bodies = {id: base64.b64decode(told["body"]) for id, told in messages(client).items()}
    return {id: loads(body)[1] for id, body in bodies.items()}


@pytest.mark.parametrize("writer", WRITERS)
def test_files(
    writer: str, spark: SparkSession, url: str, client: redis.Redis, tmp_path: Path
) -> None:
    path = str(FILES / f"{writer}.parquet")
    if writer == "spark":
        path = str(tmp_path / "rows.parquet")
        spark.read.parquet(str(FILES / "pyarrow.parquet")).write.parquet(path)
    try:
        rows = read_rows(spark, path)
        berlin = {"broker": url, "time_zone": "Europe/Berlin"}
        report = schedule(rows, extra_columns="kwargs", **berlin)
        assert (counts(report), report.dropped) == ((2, 0, 0), [])
        assert check_backlog(client, "celery") == DUE
        assert kwargs(client) == KWARGS
        priorities = {id: told["properties"]["priority"] for id, told in messages(client).items()}
        assert priorities == {FIRST: 3, "2": 0}

        assert cancel(rows, broker=url, queue="celery").accepted == 2
        days = rows.drop("eta").withColumnRenamed("day", "eta")
        report = schedule(days, time_of_day="09:30", **berlin)
        assert check_backlog(client, "celery") == DUE
        left = [name for name in report.dropped if not name.startswith("__")]
        assert left == ["amount", "email"]
        assert kwargs(client) == {FIRST: {}, "2": {}}
    finally:
        spark.conf.unset(NANOS_AS_LONG)


def test_columns_by_name(spark: SparkSession, url: str, client: redis.Redis) -> None:
    """All columns of a table as keyword arguments, and others as headers."""
    rows = read_rows(spark, str(FILES / "pyarrow.parquet"))
    table = rows.select(*EXTRA)
    named = rows.select("id", "task", "eta", F.struct(*table.columns).alias("kwargs"))
    schedule(named, broker=url)
    assert kwargs(client) == KWARGS
    client.flushall()
    star = rows.select(F.struct("*").alias("kwargs"), "id", "task", "eta")
    schedule(star, broker=url)
    assert kwargs(client)["2"].keys() == set(rows.columns)
    client.flushall()
    schedule(rows.select("id", "task", "eta", "email"), broker=url, extra_columns="headers")
    headers = {id: told["headers"]["email"] for id, told in messages(client).items()}
    assert headers == {FIRST: "ann@example.com", "2": None}


WHEN = datetime(2100, 7, 1, 9, 30)
NANOSECONDS = pa.timestamp("ns")


def test_nanoseconds_in_any_column(
    spark: SparkSession, url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Even if an earlier file of the session had them."""
    first, second = tmp_path / "first.parquet", tmp_path / "second.parquet"
    rows = {"id": ["a"], "task": ["t"], "eta": pa.array([WHEN], NANOSECONDS)}
    parquet.write_table(pa.table(rows), first)
    more = {"Opened At": pa.array([WHEN], NANOSECONDS), "plan": ["gold"], "kwargs": [None]}
    parquet.write_table(pa.table({**rows, **more}), second)
    try:
        for path in (first, second):
            schedule(read_rows(spark, str(path)), broker=url, extra_columns="kwargs")
            assert check_backlog(client, "celery") == {"a": eta_to_ms("2100-07-01T09:30:00Z")}
            found = kwargs(client)["a"]
            client.flushall()
        assert found == {"Opened At": WHEN, "plan": "gold"}
    finally:
        spark.conf.unset(NANOS_AS_LONG)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ({"eta": WHEN, "kwargs": {"when": WHEN}}, "column kwargs.when has times in nanoseconds"),
        ({"eta": WHEN, "args": [WHEN]}, r"column args.list.element has times in nanoseconds"),
    ],
)
def test_nanoseconds_within_others(
    column: dict[str, Any], words: str, spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    types = {
        "eta": NANOSECONDS,
        "kwargs": pa.struct({"when": NANOSECONDS}),
        "args": pa.list_(NANOSECONDS),
    }
    arrays = {name: pa.array([value], types[name]) for name, value in column.items()}
    parquet.write_table(pa.table({"id": ["a"], "task": ["t"], **arrays}), path)
    try:
        with pytest.raises(OptionError, match=words):
            read_rows(spark, str(path))
    finally:
        spark.conf.unset(NANOS_AS_LONG)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"booking": pa.uuid()}, r"column booking of \S*rows.parquet has the type UUID,"),
        ({"at": pa.time64("us")}, r"column at of \S* has the type TIME\(MICROS,"),
        ({"eta": NANOSECONDS, "at": pa.time64("ns")}, r"column at .* TIME\(NANOS,.* as text"),
    ],
)
def test_types_that_spark_cannot_read(
    columns: dict[str, pa.DataType], words: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Also if only some of the files have them."""
    (tmp_path / "day=1").mkdir()
    types = {"id": pa.string(), **columns}
    rows = pa.table({name: pa.nulls(1, type_) for name, type_ in types.items()})
    parquet.write_table(rows, tmp_path / "day=1" / "rows.parquet")
    try:
        for _ in range(2):
            with pytest.raises(OptionError, match=words):
                read_rows(spark, str(tmp_path), "parquet")
            fewer = rows.select(rows.column_names[:-1])
            parquet.write_table(fewer, tmp_path / "day=1" / "another.parquet")
    finally:
        spark.conf.unset(NANOS_AS_LONG)


def test_intervals_of_duckdb(spark: SparkSession, tmp_path: Path) -> None:
    """Spark has another error for them than for other types that it cannot read."""
    jvm: Any = spark._jvm
    parquet, file = jvm.org.apache.parquet, tmp_path / "rows.parquet"
    schema = parquet.schema.MessageTypeParser.parseMessageType(
        "message rows { optional fixed_len_byte_array(12) every (INTERVAL); }"
    )
    writer = parquet.hadoop.example.ExampleParquetWriter.builder(
        jvm.org.apache.hadoop.fs.Path(str(file))
    )
    writer.withType(schema).build().close()
    with pytest.raises(
        OptionError, match=r"column every of \S*rows.parquet has the type INTERVAL,"
    ):
        read_rows(spark, str(file))


def test_files_with_other_times(spark: SparkSession, tmp_path: Path) -> None:
    for unit in ("ns", "us"):
        rows = {"id": ["a"], "task": ["t"], "eta": pa.array([WHEN], pa.timestamp(unit))}
        parquet.write_table(pa.table(rows), tmp_path / f"{unit}.parquet")
    try:
        with pytest.raises(OptionError, match="column eta has times in nanoseconds in only one of"):
            read_rows(spark, str(tmp_path), "parquet")
    finally:
        spark.conf.unset(NANOS_AS_LONG)


def test_files_with_other_columns(
    spark: SparkSession, url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """A column that only one of them has is not lost."""
    few = {"id": ["a"], "task": ["t"], "countdown": [1e9]}
    parquet.write_table(pa.table(few), tmp_path / "a.parquet")
    more = {"id": ["b"], "task": ["t"], "countdown": [1e9], "kwargs": ['{"user": 7}']}
    parquet.write_table(pa.table(more), tmp_path / "b.parquet")
    rows = read_rows(spark, str(tmp_path), "parquet")
    assert schedule(rows, broker=url).accepted == 2
    assert kwargs(client) == {"a": {}, "b": {"user": 7}}
    parquet.write_table(pa.table({**few, "kwargs": [7]}), tmp_path / "c.parquet")
    with pytest.raises(OptionError, match="a column has different types in the files"):
        read_rows(spark, str(tmp_path), "parquet")


@pytest.mark.parametrize("without", ["a", "b"])
def test_values_beside_files_without_any(
    without: str, spark: SparkSession, url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """As pandas writes day after day. The names of directories are columns, too."""
    for id in "ab":
        folder = tmp_path / f"the day={id}"
        folder.mkdir()
        given = [None] if id == without else ['{"user": 7}']
        rows = {"id": [id], "task": ["t"], "countdown": [1e9], "kwargs": given, "queue": [None]}
        parquet.write_table(pa.table(rows), folder / "rows.parquet")
    rows = read_rows(spark, str(tmp_path), "parquet")
    assert {row["the day"] for row in rows.collect()} == {"a", "b"}
    assert schedule(rows.drop("the day"), broker=url).accepted == 2
    assert kwargs(client) == {id: {} if id == without else {"user": 7} for id in "ab"}


def test_numbers_beside_a_file_without_any(
    spark: SparkSession, url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Most files have a column without a type, which Spark reads as a number."""
    rows = {"task": ["t"], "countdown": [1e9]}
    columns = {**dict.fromkeys("abcdefgh", pa.nulls(1)), "i": pa.array([3], "int32")}
    for id, priority in columns.items():
        parquet.write_table(pa.table({"id": [id], **rows, "priority": priority}), tmp_path / id)
    assert schedule(read_rows(spark, str(tmp_path), "parquet"), broker=url).accepted == 9
    priorities = {id: told["properties"]["priority"] for id, told in messages(client).items()}
    assert priorities == {**dict.fromkeys("abcdefgh", 0), "i": 3}


def test_csv_files_with_other_columns(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Names of columns count, not their order."""
    (tmp_path / "a.csv").write_text("id,task,countdown\na,t,1000000\n")
    (tmp_path / "b.csv").write_text("task,id,countdown\nt,b,1000000\n")
    with pytest.raises(Exception, match="CSV header does not conform to the schema"):
        schedule(read_rows(spark, str(tmp_path), "csv"), broker=url)


@pytest.mark.parametrize("index", ["", "0,"], ids=["without_index", "with_index"])
def test_csv_files_with_texts_of_several_lines(
    index: str, spark: SparkSession, url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """As pandas and DuckDB write them; a line with too few columns is an error."""
    path, header = tmp_path / "rows.csv", f"{index and ','}id,task,countdown,note\n"
    path.write_text(f'{header}{index}a,t,1e9,"one\n""two"",\nx,y,1e9,three"\n{index}b,t,1e9,c\n')
    rows = read_rows(spark, str(path))
    assert schedule(rows, broker=url, extra_columns="kwargs").accepted == 2
    assert kwargs(client) == {"a": {"note": 'one\n"two",\nx,y,1e9,three'}, "b": {"note": "c"}}
    path.write_text(f"{header}{index}d,t,1e9\n")
    few = read_rows(spark, str(path)).select("id", "task", "countdown")
    with pytest.raises(Exception, match="Malformed records are detected"):
        schedule(few, broker=url)


def test_the_index_of_pandas_in_csv_files(
    spark: SparkSession, url: str, client: redis.Redis, tmp_path: Path
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text(f",id,task,countdown\n0,{name},t,1000000\n")
    rows = read_rows(spark, str(tmp_path), "csv")
    assert rows.columns == ["id", "task", "countdown"]
    assert schedule(rows, broker=url, extra_columns="kwargs").accepted == 2
    assert kwargs(client) == {"a": {}, "b": {}}
    (tmp_path / "c.csv").write_text(",task,id,countdown\n0,t,c,1000000\n")
    with pytest.raises(Exception, match="CSV header does not conform to the schema"):
        schedule(read_rows(spark, str(tmp_path), "csv"), broker=url)


@pytest.mark.parametrize("format", ["parquet", "csv", "json"])
def test_directories_with_values_in_their_names(
    format: str, spark: SparkSession, tmp_path: Path
) -> None:
    """The values are text, even if they look like numbers."""
    for id in ("0017", "18"):
        rows = spark.createDataFrame([("t", "1000000")], "task string, countdown string")
        rows.write.option("header", "true").format(format).save(f"{tmp_path}/queue=08/id={id}")
    found = read_rows(spark, str(tmp_path), format)
    assert sorted(found.select("id", "queue").collect()) == [("0017", "08"), ("18", "08")]


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_files_without_anything(suffix: str, spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}"
    path.touch()
    with pytest.raises(OptionError, match="has no rows"):
        read_rows(spark, str(path))


def test_columns_without_any_value(
    spark: SparkSession, url: str, client: redis.Redis, tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    nothing = pa.nulls(1)
    columns = dict.fromkeys(("args", "kwargs", "eta", "queue", "headers", "expires"), nothing)
    rows = {"id": ["a"], "task": ["t"], "countdown": [1e9], "priority": nothing, **columns}
    parquet.write_table(pa.table(rows), path)
    assert schedule(read_rows(spark, str(path)), broker=url).accepted == 1
    assert kwargs(client) == {"a": {}}
    rows = spark.createDataFrame([("b", "t", 1e9)], "id string, task string, countdown double")
    assert schedule(rows.withColumn("kwargs", F.lit(None)), broker=url).accepted == 1


def test_columns_that_are_refused(spark: SparkSession, url: str, tmp_path: Path) -> None:
    rows = spark.createDataFrame([("a", "t", 1e9)], "id string, task string, countdown double")
    variant = rows.select("*", F.expr("""parse_json('{"x": 1}') AS x"""))
    with pytest.raises(AnalysisException, match="column x is of type variant: convert variants"):
        schedule(variant, broker=url, extra_columns="kwargs")
    months = rows.select("*", F.expr("INTERVAL '1' YEAR AS x"))
    with pytest.raises(AnalysisException, match="column x is of type interval year: leave it out"):
        schedule(months, broker=url)
    grouped = rows.withColumn("group", F.lit("staff"))
    with pytest.raises(AnalysisException, match="column 'group' would replace the header"):
        schedule(grouped, broker=url, extra_columns="headers")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match="has no rows: there is no parquet file, or it is empty"):
        read_rows(spark, str(tmp_path / "empty"), "parquet")


CSV = """user,when,plan
7,2100-07-01 09:30,gold
8,2100-01-01,"si""lver"
9,soon,
"""


@pytest.mark.parametrize("by_sql", [False, True])
def test_renames_and_casts(
    by_sql: bool, run: Run, url: str, client: redis.Redis, tmp_path: Path
) -> None:
    path, rejects = tmp_path / "rows.csv", tmp_path / "rejects"
    path.write_text(CSV)
    columns = "user AS id, 'mail.remind' AS task, when AS eta", "plan, 'x, y' AS text"
    query = ["--select", columns[0], "--select", columns[1]]
    if by_sql:
        query = ["--sql", f"SELECT {', '.join(columns)} FROM rows WHERE user < 10"]
    told = ("--time-zone", "Europe/Berlin", "--time-of-day", "09:30", "--rejects", str(rejects))
    extra = ("--extra-columns", "kwargs")
    result = run("schedule", str(path), "-b", url, *query, *told, *extra, "--json")
    report = json.loads(result.stdout)
    assert (report["accepted"], report["refused"]) == (2, 1)
    assert check_backlog(client, "celery") == {"7": DUE[FIRST], "8": DUE["2"]}
    assert kwargs(client) == {
        "7": {"plan": "gold", "text": "x, y"},
        "8": {"plan": 'si"lver', "text": "x, y"},
    }
    [file] = rejects.iterdir()
    assert json.loads(file.read_text())["row"]["eta"] == "soon"

    result = run("cancel", str(path), "-b", url, "--queue", "celery", "--select", "*, user AS id")
    assert result.stdout.splitlines()[-1] == "2 cancelled, 1 already done"
    assert "2 columns left out" not in result.stderr
    assert "3 columns left out (--extra-columns): user, when, plan" in result.stderr
