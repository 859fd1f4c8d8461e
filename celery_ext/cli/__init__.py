"""`celery -A proj delayed …`: delayed tasks at the terminal.

Celery loads this module whenever its command line starts, so the commands load when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
from celery.bin.base import handle_preload_options
from click_didyoumean import DYMGroup  # type: ignore[import-untyped]

from ..worker import hooks  # noqa: F401  which watches them

#: The modules of this package, and the commands in each, in the order of the help page.
_MODULES = {
    "tasks.listing": "list show find count",
    "tasks.outcomes": "failed running retrying slow history",
    "queues.metrics": "metrics",
    "queues.forecast": "forecast",
    "queues.watch": "watch",
    "tasks.events": "events",
    "tasks.change": "cancel reschedule redirect run-now",
    "tasks.dead": "dead",
    "tasks.expectations": "expectations",
    "queues.limits": "limits set-limit reset-limit",
    "queues.policies": "policies apply-policies drop-policies",
    "queues.pauses": "pause resume",
    "queues.consumers": "consumers",
    "queues.partitions": "partitions",
    "doctor": "doctor",
    "backup": "backup restore",
    "api": "serve token",
}
COMMANDS = {name: module for module, names in _MODULES.items() for name in names.split()}


class LazyGroup(DYMGroup):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command. Returns None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        try:
            module = import_module(f"{__package__}.{COMMANDS[cmd_name]}")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "rich":
                raise
            raise click.ClickException(
                "these commands need rich: pip install 'kombu-delayed[cli]'"
            ) from error
        commands = (each for each in vars(module).values() if isinstance(each, click.Command))
        return next(each for each in commands if each.name == cmd_name)


@click.group(cls=LazyGroup)
@click.pass_context
@handle_preload_options
def delayed(ctx: click.Context, **preload_options: Any) -> None:
    """Show and change delayed tasks; no worker needs to run.

    Times are ISO 8601 (UTC without a zone) or relative to now: 90s, +2h, 3d, 1h30m, -15m. All
    output is in UTC.

    Exit codes: 0 done; 1 nothing found, no longer delayed, or an error; 2 wrong usage.
    """
