"""Formats times, lengths of time and tasks for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, OverflowMethod, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column, Table
from rich.text import Text

from kombu_delayed.message.durations import length_text
from kombu_delayed.store.calls.shards import is_shard, number_of, queue_of

from .short_repr import printable
from .task_info import TaskInfo

STATE_STYLES = {
    "delayed": "cyan",
    "waiting": "cyan",
    "ready": "green",
    "unacked": "yellow",
    "dead": "red",
    "running": "yellow",
    "retrying": "magenta",
    "succeeded": "green",
    "failed": "red",
    "lost": "red",
}

#: The width of a terminal from which on tables have all columns.
WIDE = 100

#: The columns of tables whose text may wrap or be cut, and the width that one needs at least.
FLEXIBLE = frozenset(
    {
        *("by", "consumer", "limit", "name", "of", "paused", "policies", "queue", "queues"),
        *("reason", "scopes", "task", "tenants", "why"),
    }
)
FLEXIBLE_WIDTH = 12

#: The states in which a task can be cancelled and moved.
MOVABLE = ("delayed", "waiting")


def plain(text: object, style: str = "") -> Text:
    """Text as it is, except for characters that would move a terminal's cursor."""
    return Text(printable(str(text)), style=style)


def queue_data(shard: str | None) -> dict[str, Any]:
    """A queue for JSON, with the number of its shard unless that is the first."""
    found = {"queue": shard and queue_of(shard)}
    return {**found, "shard": number_of(shard)} if shard and is_shard(shard) else found


def number(count: int) -> str:
    return f"{count:,}"


def _counted(what: str, count: int) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


tasks_word = partial(_counted, "task")
queues_word = partial(_counted, "queue")
letters_word = partial(_counted, "dead letter")


def moment(at: datetime | None) -> str:
    """A time in UTC to the second, without the year if it is the current one."""
    if at is None:
        return ""
    this_year = at.year == datetime.now(timezone.utc).year
    return f"{at:%m-%d %H:%M:%S}" if this_year else f"{at:%Y-%m-%d %H:%M:%S}"


def away(length: timedelta) -> str:
    """How far away a time is, in whole seconds: `in 2h 5m`, `3m ago`."""
    shown = length_text(int(abs(length.total_seconds())))
    return f"{shown} ago" if length < timedelta() else f"in {shown}"


def remaining(length: timedelta | None) -> Text:
    """The time that remains; red if it is overdue."""
    if length is None:
        return Text()
    return Text(away(length), style="red" if length < timedelta() else "")


def call(info: TaskInfo) -> Text:
    arguments = info.args if info.kwargs in ("", "{}") else f"{info.args} {info.kwargs}"
    shown = plain(info.task or "(no task)", style="bold")
    return one_line(shown.append_text(plain(arguments, style="not bold")))


def one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def table(*columns: str, numbers: Iterable[str] = (), title: str | None = None) -> Table:
    """An empty table with these headings. Only the columns in FLEXIBLE wrap."""
    made = _Fitting(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        title_style="bold",
    )
    for column in columns:
        overflow: OverflowMethod = "fold" if column in FLEXIBLE else "ellipsis"
        made.add_column(column, no_wrap=column not in FLEXIBLE, overflow=overflow)
    for column in numbers:
        made.add_column(column, justify="right", no_wrap=True)
    return made


class _Fitting(Table):
    """A table that shows the cells of a row below each other if the terminal is too narrow."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Rich calls this with the width that it has."""
        if self._least_width(console, options) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text(str(self.title), "bold")
        yield self._below_each_other()

    def _least_width(self, console: Console, options: ConsoleOptions) -> int:
        wide = options.update(max_width=1_000)

        def width(column: Column) -> int:
            cells = (column.header, *column.cells)
            longest = max(console.measure(cell, options=wide).maximum for cell in cells)
            return longest if column.no_wrap else min(longest, FLEXIBLE_WIDTH)

        # Each column has a space behind it, and the box a character between two columns.
        return sum(2 + width(column) for column in self.columns) - 1

    def _below_each_other(self) -> Table:
        made = facts_table()
        for row in zip(*(column.cells for column in self.columns), strict=True):
            if made.row_count:
                made.add_row("", "")
            for column, cell in zip(self.columns, row, strict=True):
                if str(cell):
                    made.add_row(column.header, cell)
        return made


def facts_table() -> Table:
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim", justify="right")
    made.add_column(overflow="fold")
    return made


def progress_bars(*before: ProgressColumn, **options: Any) -> Progress:
    """Progress bars that show what is done and, if known, the total."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*before, *columns, TimeElapsedColumn(), **options)


class TasksTable:
    """Tasks in rows. A narrow table has no column for how far away they are: ids stay whole."""

    def __init__(self, infos: Iterable[TaskInfo], title: str | None = None) -> None:
        self._infos = [*infos]
        self._title = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Rich calls this with the width that it has."""
        yield _tasks_table(self._infos, self._title, options.max_width >= WIDE)


def _tasks_table(infos: Iterable[TaskInfo], title: str | None, is_wide: bool) -> Table:
    made = table("due (UTC)", *([""] if is_wide else []), "queue", "task", "id", title=title)
    made.columns[-1].overflow = "fold"
    for info in infos:
        made.add_row(
            moment(info.eta),
            *([remaining(info.remaining)] if is_wide else []),
            plain(info.queue),
            call(info),
            plain(info.id, style="dim"),
        )
    return made
