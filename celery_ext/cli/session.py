"""The common parts of all commands: the app's backlog, where to print, how to show errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, update_wrapper
from io import TextIOWrapper
from typing import Any, NoReturn

import click
from celery.bin.base import CeleryCommand
from rich.console import Console, RenderableType

from ..app.commands import expected_failures
from ..control.delayed import Delayed
from ..errors import QueryError
from ..tasks.formatting import plain, progress_bars
from ..tasks.short_repr import printable

#: The width of output to a file or a pipe.
WIDE = 200


class Command(CeleryCommand):
    """A command whose expected failures are one line."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options only; newer versions of click would list the arguments among them."""
        options = (param for param in self.get_params(ctx) if isinstance(param, click.Option))
        rows = [row for option in options if (row := option.get_help_record(ctx))]
        with formatter.section("Options"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it. Raises ClickException for errors that the user or an operator can fix."""
        with expected_failures():
            return super().invoke(ctx)


class Session:
    """One run of a command."""

    def __init__(self, ctx: click.Context, as_json: bool) -> None:
        self._ctx = ctx
        self.app = ctx.obj.app
        self.as_json = as_json
        self.out = _console(ctx, stderr=False)
        self.err = _console(ctx, stderr=True)

    @cached_property
    def delayed(self) -> Delayed:
        """The app's backlog, which connects on first use."""
        delayed = Delayed(self.app)
        self._ctx.call_on_close(delayed.close)
        return delayed

    def pass_over_nodes_down(self) -> list[str]:
        """Leave out the nodes of a Cluster that do not answer; returns them, and says so."""
        self.delayed, down = those_that_answer(self.delayed)
        if down:
            self.err.print(missing_text(down), style="yellow")
        return down

    def print(self, *what: RenderableType) -> None:
        """Print on stdout, unless the user asked for JSON."""
        if not self.as_json:
            self.out.print(*what)

    def fits(self, table: RenderableType) -> bool:
        """Whether the terminal is wide enough for a table."""
        wide = self.out.options.update(max_width=10 * WIDE)
        return self.out.measure(table, options=wide).maximum <= self.out.width

    def emit(self, data: Any) -> None:
        if self.as_json:
            click.echo(json.dumps(data, indent=2))

    def emit_each(self, items: Iterable[Any]) -> int:
        """Print a JSON array as it is read, one item per line; returns the number of items."""
        count = 0
        for item in items:
            click.echo(("[\n" if count == 0 else ",\n") + json.dumps(item), nl=False)
            count += 1
        click.echo("\n]" if count else "[]")
        return count

    def nothing(self, text: str) -> NoReturn:
        """Say on stderr that nothing was found, and end with exit code 1."""
        self.err.print(text)
        self._ctx.exit(1)

    def exit(self, code: int) -> NoReturn:
        self._ctx.exit(code)

    def doubt(self, queue: str | None) -> None:
        """Warn on stderr of an unknown queue: an empty queue looks the same as a mistyped one."""
        try:
            if queue:
                self.delayed.check_queue(queue)
        except QueryError as error:
            self.err.print(f"{str(error)[0].upper()}{str(error)[1:]}", style="yellow")

    def confirm(self, question: str) -> None:
        """Ask on stderr. Raises Abort unless the answer is yes."""
        click.confirm(printable(question), abort=True, err=True)

    @contextmanager
    def progress(self, what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """A progress bar on stderr if that is a terminal; call what it yields with a count."""
        if self._ctx.obj.quiet or not self.err.is_terminal:
            yield lambda count: None
            return
        with progress_bars(console=self.err, transient=True) as bars:
            bar = bars.add_task(what, total=total)
            yield lambda count: bars.advance(bar, count)


def those_that_answer(delayed: Delayed) -> tuple[Delayed, list[str]]:
    """The queues without those on nodes of a Cluster that do not answer, and these nodes."""
    found = delayed.reachable() or delayed
    return found, sorted(map(str, found.left_out))


def missing_text(down: list[str]) -> str:
    return f"No answer from {' and '.join(down)}: its queues are missing here."


class _Console(Console):
    """Shows names of the broker as they are, except for characters that would move a cursor."""

    def print(self, *objects: Any, **options: Any) -> None:
        shown = (plain(each) if isinstance(each, str) else each for each in objects)
        super().print(*shown, **options)


def _console(ctx: click.Context, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")  # it need not be UTF-8
    console = _Console(
        stderr=stderr,
        no_color=ctx.obj.no_color or None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    if not console.is_terminal and "COLUMNS" not in console._environ:
        console.width = WIDE
    return console


def command(
    name: str,
    group: click.Group | None = None,
    doubts_queue: bool = True,
    despite_nodes_down: bool = False,
) -> Callable[[Callable[..., None]], click.Command]:
    """A command with `--json`, whose function is given the session first; of a group, if any.

    With `doubts_queue` it warns of an unknown queue. Turn it off if the queue is from elsewhere, or
    if the function refuses an unknown one. With `despite_nodes_down` it shows all queues, or those
    on the nodes of a Cluster that answer.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        def run(ctx: click.Context, /, as_json: bool, **given: Any) -> None:
            session = Session(ctx, as_json)
            if doubts_queue:
                session.doubt(given.get("queue"))
            is_partial = (
                despite_nodes_down and given.get("queue") is None and session.pass_over_nodes_down()
            )
            function(session, **given)
            if is_partial:
                session.exit(1)

        update_wrapper(run, function)
        json_option = click.option(
            "--json", "as_json", is_flag=True, help="Print JSON and nothing else."
        )
        made = click.command(name, cls=Command)(json_option(click.pass_context(run)))
        if group is not None:
            group.add_command(made)
        return made

    return decorate
