"""`serve`: the backlog over HTTP."""

from __future__ import annotations

from typing import Any

import click

from celery_ext.http.serving.command import run, serve_options

from .session import Command


@click.command("serve", cls=Command)
@serve_options
@click.pass_context
def serve(ctx: click.Context, /, **given: Any) -> None:
    """Serve the HTTP API.

    From other machines every request needs a token: see `token create`.
    """
    run(ctx.obj.app, **given)
