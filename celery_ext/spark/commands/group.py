"""The parts that all jobs of the command line share: group, errors, session, options, progress.

A job is a click command, `@main.command()`, in a module of this package. It reads its options,
calls a function of `celery_ext.spark` and prints the result.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click
from click_didyoumean import DYMGroup  # type: ignore[import-untyped]
from kombu.exceptions import OperationalError
from py4j.protocol import Py4JJavaError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, PySparkException
from pyspark.logger import PySparkLogger
from rich.console import Console
from rich.progress import Progress, SpinnerColumn
from rich.table import Table

from celery_ext.app.commands import all_of
from celery_ext.app.settings import suggestion
from celery_ext.spark.commands.java import session
from celery_ext.spark.options import OF_TABLES, names
from celery_ext.spark.sink.registry import may_be_done
from celery_ext.tasks.formatting import progress_bars
from kombu_delayed.errors import DelayedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Spark's own message, with its causes.
_SPARK_ERROR = re.compile(
    r": org\.apache\.spark\.[\w.]+: (?:\[[\w.]+\] )?(.+?)(?:  SQLSTATE.*)?$", re.M
)

#: The last line of a Python error, as Spark passes it on.
_PYTHON_ERROR = re.compile(
    r"^(?!org\.|java\.)(?:(?:\w+\.)+[A-Z]\w*|[A-Z]\w*(?:Error|Exception)): (.+)$", re.MULTILINE
)

#: Where Spark's message ends, and its plan, the text of a query or a trace begins.
_BEHIND = re.compile(r";\s*\n|\n\n?== |\n\nJVM stacktrace")

#: Java's errors if Spark cannot write, in words.
_IN_WORDS = {
    re.compile(r'No FileSystem for scheme "?([\w+.-]+)'): (
        "Spark has no file system for {}:// (add its library, for example with --conf "
        "spark.jars.packages=…)"
    ),
    re.compile(r"ClassNotFoundException: Class (\S+FileSystem) not found"): (
        "Spark does not have the library with {} (add it, for example with --conf "
        "spark.jars.packages=…)"
    ),
    re.compile(r"Mkdirs failed to create (?:file:)?(\S+?)(?:/_temporary\S*)? \("): (
        "Spark cannot make the directory {}"
    ),
}

#: Loggers that print an error with its traces. The command prints it in one line anyway.
_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")

#: Errors of py4j if Java does not answer. redis-py has its own.
_JAVA_HAS_ENDED = (Py4JNetworkError, ConnectionError)

#: Known errors, which are shown in one line.
_ERRORS = (DelayedError, OperationalError, PySparkException, Py4JJavaError, *_JAVA_HAS_ENDED)

console = Console(stderr=True, markup=False)


def _is_news(record: logging.LogRecord) -> bool:
    """False for py4j's trace of an interrupt, which it sends to the root logger."""
    return "while sending command" not in record.getMessage()


def output() -> Console:
    """Standard output, for tables. Names in brackets are not read as markup."""
    return Console(markup=False)


class Names(click.ParamType):  # type: ignore[type-arg]
    """Names separated by commas, or a JSON list of names."""

    name = "names"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        try:
            return names(value)
        except ValueError:
            self.fail(
                f"{value!r} is not a list of names: separate them by commas, or give a JSON list",
                param,
                ctx,
            )


NAMES = Names()


class Jobs(DYMGroup):
    """Commands that show known errors in one line, with exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        for name in _LOGGERS:
            PySparkLogger.getLogger(name).disabled = True
        logging.getLogger().addFilter(_is_news)
        try:
            return super().invoke(ctx)
        except _ERRORS as error:
            raise click.ClickException(meaning(error)) from error


def meaning(error: Exception) -> str:
    """The message of an error for users, without the traces of an executor."""
    try:
        text = str(error)
    except _JAVA_HAS_ENDED as ended:  # Py4JJavaError asks Java for its text
        return meaning(ended)
    if isinstance(error, _JAVA_HAS_ENDED):
        return (
            f"Spark's Java process has ended, perhaps for lack of memory ({text}): give it more, "
            "for example --conf spark.driver.memory=4g before the name of the command"
        )
    for pattern, words in _IN_WORDS.items():
        if match := pattern.search(text):
            return words.format(match[1])
    if isinstance(error, Py4JJavaError):
        return " ".join(_SPARK_ERROR.findall(text)) or error.java_exception.toString()
    found = _PYTHON_ERROR.findall(text) if isinstance(error, PySparkException) else ()
    said = found[-1] if found else _BEHIND.split(text)[0]
    return str(said).strip().removesuffix(OF_TABLES)


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Add the name of the option to an error in SQL."""
    try:
        yield
    except AnalysisException as error:
        raise click.ClickException(f"{option}: {meaning(error)}") from error


def unknown_queues(queues: Iterable[str] | None, known: Iterable[str], what: str) -> Iterator[str]:
    """A sentence for each queue that a backup or an archive does not have."""
    there = sorted(known)
    for queue in queues or ():
        if queue not in there:
            has = suggestion(queue, there or ["no message"], "it has")
            yield f"{what} has no queue {queue!r}{has}"


@click.group(cls=Jobs)
@click.option(
    "--master", help="Where Spark runs. Default: this machine, or as Spark is configured."
)
@click.option(
    "--conf",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of Spark, such as spark.driver.memory=4g. May be given several times.",
)
@click.pass_context
def main(ctx: click.Context, master: str | None, conf: tuple[str, ...]) -> None:
    """Jobs on delayed tasks and their history, in Spark."""
    settings = {"spark.log.level": "OFF"}
    if master:
        settings["spark.master"] = master
    for each in conf:
        name, equals, value = each.partition("=")
        if not equals:
            raise click.UsageError(f"--conf takes NAME=VALUE, not {each!r}")
        settings[name] = value
    ctx.obj = settings


def spark_of(ctx: click.Context) -> SparkSession:
    """The session for the options. Raises JavaError."""
    with console.status("Starting Spark"):
        return session(**ctx.obj)


#: The options for the connection to a broker.
connection_options = all_of(
    click.option("-b", "--broker", help="The broker's URL."),
    click.option("--broker-env", help="The environment variable with the broker's URL."),
    click.option("-A", "--app", help="The Celery app whose broker to use, as for celery -A."),
    click.option(
        "--transport-options", help="Transport options, as in broker_transport_options, as JSON."
    ),
)

#: The same, for jobs that read some of its queues.
broker_options = all_of(
    connection_options,
    click.option("--queues", help="Only these, separated by commas."),
)

#: For jobs that write to a broker.
job_options = all_of(
    click.option(
        "--job-id",
        default=lambda: str(uuid4()),
        help="Name of the job. Running it again under the same name does nothing twice.",
    ),
    click.option(
        "--rejects", help="A directory or URI for refused rows. Default: they stop the job."
    ),
    click.option("--total-rows", help="How many rows there are, for the percentage of `jobs`."),
    click.option("--ledger-seconds", help="How long the ledger of the job is kept, in seconds."),
    click.option(
        "--max-rows-per-second", help="The most rows a second, of all tasks of Spark together."
    ),
    click.option(
        "--latency-budget-ms",
        help="Pause while the broker answers this many ms later than its best. 0: off. Default: 1.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the counts as a line of JSON."),
)

archive_option = click.option("--archive", required=True, help="The archive of lifecycle events.")
target_option = click.option(
    "--target-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=60,
    show_default=True,
    help="How late a task may be.",
)
time_options = all_of(
    click.option("--since", type=click.DateTime(), help="Only events from this time (UTC) on."),
    click.option("--until", type=click.DateTime(), help="Only events before this time (UTC)."),
)


def between(events: DataFrame, since: datetime | None, until: datetime | None) -> DataFrame:
    """The events of the time span of `time_options`."""
    if since is not None:
        events = events.where(events.at >= since.replace(tzinfo=timezone.utc))
    if until is not None:
        events = events.where(events.at < until.replace(tzinfo=timezone.utc))
    return events


@contextmanager
def run_again(job_id: str) -> Iterator[None]:
    """Print the id of a job before it begins, and if it fails: the same id continues it."""
    click.echo(f"Job {job_id}", err=True)
    try:
        yield
    except (*_ERRORS, KeyboardInterrupt) as error:
        if may_be_done(error):
            click.echo(
                f"Some rows may be done. To continue, run it again with --job-id {job_id}", err=True
            )
        raise


def empty_table(*columns: str, numbers: Iterable[str] = ()) -> Table:
    made = Table(*columns, box=None, header_style="dim")
    for name in numbers:
        made.add_column(name, justify="right")
    return made


def progress_bar() -> Progress:
    """A progress bar with a count and, if known, its total."""
    return progress_bars(SpinnerColumn(), console=console)
