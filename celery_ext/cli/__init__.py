"""`celery -A proj delayed …`: delayed tasks at the terminal.

Celery loads this module whenever its command line starts, so the commands load when they are used.
"""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import handle_preload_options

from ..worker import hooks  # noqa: F401  which watches them
from .lazy import LazyGroup

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
    "serve": "serve",
    "token": "token",
}
COMMANDS = {name: module for module, names in _MODULES.items() for name in names.split()}


@click.group(cls=LazyGroup, modules=COMMANDS)
@click.pass_context
@handle_preload_options
def delayed(ctx: click.Context, **preload_options: Any) -> None:
    """Show and change delayed tasks; no worker needs to run.

    Times are ISO 8601 (UTC without a zone) or relative to now: 90s, +2h, 3d, 1h30m, -15m.

    Exit codes: 0 done; 1 nothing found, no longer delayed, or an error; 2 wrong usage.
    """
