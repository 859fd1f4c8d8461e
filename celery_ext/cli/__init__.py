"""`celery -A proj delayed …`: what is delayed, at the terminal.

Celery loads this module whenever its command line starts, so the commands load when they are used.
"""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import handle_preload_options

from ..worker import hooks  # noqa: F401  which watches them
from .lazy import LazyGroup

#: Command -> the module of this package that has it.
COMMANDS = {
    "list": "tasks.listing",
    "show": "tasks.listing",
    "find": "tasks.listing",
    "count": "tasks.listing",
    "failed": "tasks.outcomes",
    "running": "tasks.outcomes",
    "retrying": "tasks.outcomes",
    "slow": "tasks.outcomes",
    "history": "tasks.outcomes",
    "metrics": "queues.metrics",
    "forecast": "queues.forecast",
    "watch": "queues.watch",
    "events": "tasks.events",
    "cancel": "tasks.change",
    "reschedule": "tasks.change",
    "redirect": "tasks.change",
    "run-now": "tasks.change",
    "dead": "tasks.dead",
    "expectations": "tasks.expectations",
    "limits": "queues.limits",
    "set-limit": "queues.limits",
    "reset-limit": "queues.limits",
    "policies": "queues.policies",
    "apply-policies": "queues.policies",
    "drop-policies": "queues.policies",
    "pause": "queues.pauses",
    "resume": "queues.pauses",
    "consumers": "queues.consumers",
    "partitions": "queues.partitions",
    "doctor": "doctor",
    "backup": "backup",
    "restore": "backup",
    "serve": "serve",
    "token": "token",
}


@click.group(cls=LazyGroup, modules=COMMANDS)
@click.pass_context
@handle_preload_options
def delayed(ctx: click.Context, **preload_options: Any) -> None:
    """Show and change delayed tasks; no worker needs to run.

    Times are ISO 8601 (UTC without a zone) or relative to now: 90s, +2h, 3d, 1h30m, -15m.

    Exit codes: 0 done; 1 nothing found, no longer delayed, or an error; 2 wrong usage.
    """
