"""`python -m celery_ext.http`: HTTP jobs without a project, with one command."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from typing import Any

import click
from celery.utils.log import get_logger

from ..app.commands import expected_failures
from .options import HttpOptions
from .serving.command import run, serve_options
from .serving.standalone import BROKER, OPTIONS, WorkerProcess, make_app

#: The variable with the secrets that sign callbacks: an option would show in the process list.
SECRETS = "DELAYED_CALLBACK_SECRETS"

logger = get_logger(__name__)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--broker",
    default="delayed+embedded://./delayed-http-data",
    show_default=True,
    help="Where jobs are stored: a server started here, or delayed+redis://host/0.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(0, 1_000),
    default=20,
    show_default=True,
    help="Concurrent callbacks. 0: only serve; a worker runs elsewhere.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="HOST",
    help="An internal host that callbacks may contact; repeatable.",
)
@serve_options
def main(broker: str, concurrency: int, allow: tuple[str, ...], **given: Any) -> None:
    """Take HTTP jobs, keep them, and post to their callbacks when they are due.

    Callbacks are signed with the secrets in the variable DELAYED_CALLBACK_SECRETS, separated by
    commas.
    """
    secrets = [each for each in os.environ.get(SECRETS, "").split(",") if each]
    if not secrets:
        click.echo(f"Callbacks are not signed: {SECRETS} has no secret.", err=True)
    options = {"callbacks": True, "callback_allow": list(allow), "callback_secrets": secrets}
    with expected_failures():
        HttpOptions.parse(options)
        app = make_app(broker, options)
        environment = {BROKER: broker, OPTIONS: json.dumps(options)}
        worker = WorkerProcess(environment, concurrency) if concurrency else nullcontext()
        # Uvicorn sends the signal that ended it again, which would end this process and leave the
        # worker behind.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        with worker:
            run(app, jobs_only=True, **given)


if __name__ == "__main__":
    main()
