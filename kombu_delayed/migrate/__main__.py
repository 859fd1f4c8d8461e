"""`python -m kombu_delayed.migrate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from ..transport.channel.channel import Channel
from . import (
    FAILURES,
    Direction,
    MigrationRefused,
    Report,
    open_channel,
    plan,
    to_delayed,
    to_stock,
)


def show(report: Report) -> None:
    """Print what would move or has moved."""
    rows = [(*move, str(count)) for move, count in sorted(report.moves.items())]
    if rows:
        _show_table(("queue", "from", "to", "messages"), rows)
    else:
        click.echo("There is nothing to move.")
    if report.young:
        click.echo(
            f"{report.young} messages were not moved, because stock workers have held them for too "
            "short a time (see --older-than)."
        )
    if report.left_count:
        click.echo(f"{report.left_count} messages were not moved:")
    for key, id, reason in report.left[:50]:
        click.echo(f"  {key!r} {id}: {reason}")
    if report.left_count > 50:
        click.echo(f"  … and {report.left_count - 50} more")


def _show_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        for row in (names, *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            click.echo("  ".join(cells).rstrip())
        return
    table = Table()
    for name in names:
        table.add_column(name, justify="right" if name == "messages" else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)


def _steps(_: Any, __: Any, text: str | None) -> list[int] | None:
    try:
        return [int(part) for part in text.split(",")] if text else None
    except ValueError:
        raise click.BadParameter("write numbers from 0 to 9 with commas: 0,3,6,9") from None


def _transport_option(_: Any, __: Any, given: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"write name=value, not {text!r}")
        options[name] = _value(name, value)
    return options


def _value(name: str, text: str) -> Any:
    """Parse a value as JSON if it is JSON and the option is not one that is always text."""
    if isinstance(getattr(Channel, name, None), str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shared(command: Any) -> Any:
    for decorate in reversed(
        (
            click.argument("url"),
            click.option(
                "--queue", "queues", multiple=True, help="A queue without a binding; repeatable."
            ),
            click.option("--yes", is_flag=True, help="Do not ask."),
            click.option("--force", is_flag=True, help="Run even if it would be refused."),
            click.option("--key-prefix", default="", help="The option global_keyprefix."),
            click.option(
                "--priority-steps",
                callback=_steps,
                help="The option priority_steps, such as 0,3,6,9.",
            ),
            click.option(
                "--option",
                "options",
                multiple=True,
                callback=_transport_option,
                metavar="NAME=VALUE",
                help="Another transport option, such as unacked_key=held.",
            ),
        )
    ):
        command = decorate(command)
    return command


@click.group()
def main() -> None:
    """Move messages between the stock Redis transport and this one.

    Give the options that your programs have in broker_transport_options. Without --yes, what would
    move is shown first.
    """


@main.command("to-delayed")
@click.option(
    "--older-than",
    "older_than_seconds",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help=(
        "Move messages that stock workers have held for this long. 0: all; stop the "
        "workers first. Default: 3600."
    ),
)
@_shared
def to_delayed_command(**given: Any) -> None:
    """Move messages that stock workers left behind, and ready ETA messages."""
    _command("to-delayed", to_delayed, **given)


@main.command("to-stock")
@click.option("--dead", is_flag=True, help="Also replay dead letters.")
@_shared
def to_stock_command(**given: Any) -> None:
    """Hand the backlog back to stock workers."""
    _command("to-stock", to_stock, **given)


def _command(
    direction: Direction,
    run: Callable[..., Report],
    *,
    url: str,
    yes: bool,
    key_prefix: str,
    priority_steps: list[int] | None,
    options: dict[str, Any],
    **given: Any,
) -> None:
    options = {"global_keyprefix": key_prefix, **options}
    if priority_steps:
        options["priority_steps"] = priority_steps
    try:
        with open_channel(url, **options) as channel:
            planned = plan(channel, direction, **given)
            show(planned)
            if _agreed(planned, yes, given["force"]):
                with click.progressbar(length=planned.seen, label="Moving", file=sys.stderr) as bar:
                    done = run(channel, **given, progress=bar.update)
                click.echo("Moved:")
                show(done)
    except FAILURES as error:
        raise click.ClickException(str(error)) from error


def _agreed(planned: Report, yes: bool, force: bool) -> bool:
    if planned.blockers and not force:
        raise MigrationRefused("; ".join(planned.blockers) + ", or give --force.")
    if not planned.moved:
        return False
    if yes:
        return True
    if _is_terminal():
        return click.confirm("Move them?")
    click.echo("Nothing was moved: give --yes to do it.")
    return False


def _is_terminal() -> bool:
    return sys.stdin.isatty()


if __name__ == "__main__":
    main()
