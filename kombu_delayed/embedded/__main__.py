"""`python -m kombu_delayed.embedded`: the server of a directory, at the command line."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import EmbeddedServerError
from .server import Status, ensure, status, stop


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except EmbeddedServerError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group)
def main() -> None:
    """Start, inspect or stop the server behind delayed+embedded:///DIRECTORY."""


def _named(_: click.Context, __: click.Parameter, directory: str) -> Path:
    if not directory:  # a variable that is not set; Path would mean the working directory
        raise click.BadParameter("is empty: name a directory")
    return Path(directory)


_directory = click.argument("directory", type=click.Path(), callback=_named)


@main.command("status")
@_directory
@click.pass_context
def _status_command(ctx: click.Context, directory: Path) -> None:
    """Show the server of DIRECTORY; exit code 1 when it is not running."""
    found = status(directory)
    click.echo(_described(directory, found))
    if not found.running:
        ctx.exit(1)


@main.command("start")
@_directory
def _start_command(directory: Path) -> None:
    """Start the server of DIRECTORY unless it is running."""
    ensure(directory)
    click.echo(_described(directory, status(directory)))


@main.command("stop")
@_directory
@click.pass_context
def _stop_command(ctx: click.Context, directory: Path) -> None:
    """Stop the server of DIRECTORY; exit code 1 when none was running."""
    stopped = stop(directory)
    click.echo(f"{directory}: {'stopped' if stopped else 'not running'}")
    if not stopped:
        ctx.exit(1)


def _described(directory: Path, found: Status) -> str:
    if not found.running:
        return f"{directory}: not running"
    refuses = "\n  writes  refused: it cannot write its data. Free space on its disk"
    return (
        f"{directory}: running\n"
        f"  server  {found.server_name} {found.server_version}, pid {found.pid}, "
        f"up {found.uptime_seconds} s\n"
        f"  socket  {found.socket}\n"
        f"  data    {found.keys} keys, {found.used_memory_bytes / 2**20:.1f} MiB"
        f"{refuses if found.refuses_writes else ''}"
    )


if __name__ == "__main__":
    main(prog_name="python -m kombu_delayed.embedded")
