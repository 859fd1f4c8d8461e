"""Shows the progress of Spark and the result of a job on the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from threading import Event, Thread
from typing import TYPE_CHECKING

import click
from rich.table import Table

from celery_ext.control.backup.transfer import UNDECODABLE
from celery_ext.spark.sink.registry import JobReport
from celery_ext.tasks.formatting import number, plain

from .group import empty_table, output, progress_bar

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

_LOOK_SECONDS = 0.2


class Stages:
    """The tasks of all stages that were seen running. Spark plans stages as it proceeds."""

    def __init__(self, tracker: StatusTracker) -> None:
        self._tracker = tracker
        self._seen: dict[int, tuple[int, int]] = {}

    def look(self) -> tuple[int, int]:
        """Update the counts; returns the finished tasks and their total."""
        active = self._tracker.getActiveStageIds()
        for id in active:
            if info := self._tracker.getStageInfo(id):
                self._seen[id] = info.numCompletedTasks, info.numTasks
        for id in self._seen.keys() - set(active):
            self._seen[id] = (self._seen[id][1],) * 2
        pairs = self._seen.values()
        return sum(done for done, _ in pairs), sum(total for _, total in pairs)


def watching(spark: SparkSession, what: str) -> AbstractContextManager[None]:
    """Show a bar of Spark's tasks meanwhile. Over Spark Connect it has no counts."""
    context = getattr(spark, "sparkContext", None)
    look = Stages(context.statusTracker()).look if context else lambda: (0, 0)
    return following(look, f"{what}, tasks of Spark")


@contextmanager
def following(look: Callable[[], tuple[int, int]], what: str) -> Iterator[None]:
    """Show a bar that follows the counts (done, total) of `look` meanwhile."""
    with progress_bar() as bar:
        task = bar.add_task(what, total=None)

        def show() -> None:
            done, total = look()
            bar.update(task, completed=done, total=total or None)

        with _repeating(show):
            yield
        with suppress(Exception):
            show()


@contextmanager
def _repeating(step: Callable[[], None]) -> Iterator[None]:
    ended = Event()

    def run() -> None:
        while not ended.wait(_LOOK_SECONDS):
            with suppress(Exception):  # a bar stops no job
                step()

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def table(counts: Mapping[str, Mapping[str, int]]) -> Table:
    made = empty_table("queue", numbers=next(iter(counts.values()), {}))
    for queue, numbers in counts.items():
        made.add_row(plain(queue), *map(number, numbers.values()))
    return made


def show(report: JobReport, done: str, as_json: bool, rejects: str | None = None) -> None:
    """Print a job's result; `done` is the verb for its accepted rows."""
    if as_json:
        click.echo(json.dumps(asdict(report)))
        return
    if report.queues:
        output().print(table({queue: {done: n} for queue, n in report.queues.items()}), "")
    refused = f", {report.refused:,} refused" + (f": see {rejects}" if rejects else "")
    click.echo(
        f"{report.accepted:,} {done}, {report.already:,} already done"
        + (refused if report.refused else "")
    )
    if report.undecodable:
        click.echo(UNDECODABLE.format(number(report.undecodable)))
    if report.dropped:
        names = ", ".join(report.dropped)
        click.echo(f"{len(report.dropped)} columns left out (--extra-columns): {names}", err=True)


def ask(question: str, yes: bool) -> None:
    """Ask for confirmation. Raises Abort if the answer is no."""
    if not yes:
        click.confirm(question, abort=True, err=True)
