"""`serve`, `token create`, `list`, `revoke`: the HTTP API and its tokens."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Any

import click
from click_didyoumean import DYMGroup  # type: ignore[import-untyped]

from ..http.auth.identity import SCOPES
from ..http.auth.tokens import Tokens
from ..http.serving.command import run, serve_options
from ..tasks.formatting import moment, plain, table
from ..tasks.times import from_ms
from .criteria import TEXT
from .session import Command, Session, command
from .times import SPAN


@click.command("serve", cls=Command)
@serve_options
@click.pass_context
def serve(ctx: click.Context, /, **given: Any) -> None:
    """Serve the HTTP API.

    From other machines every request needs a token: see `token create`.
    """
    run(ctx.obj.app, **given)


@click.group("token", cls=DYMGroup)
def token() -> None:
    """Create, list and revoke tokens of the HTTP API."""


@command("create", token)
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    required=True,
    help="An operation that the token allows; repeatable. admin allows everything.",
)
@click.option(
    "--tenant",
    "tenants",
    type=TEXT,
    multiple=True,
    help="Restrict the token to this one; repeatable.",
)
@click.option(
    "-Q",
    "--queue",
    "queues",
    type=TEXT,
    multiple=True,
    help="Restrict the token to this one; repeatable.",
)
@click.option(
    "--expires", type=SPAN, help="How long it is valid, such as 90d. Default: without end."
)
def create(
    session: Session,
    name: str,
    scopes: tuple[str, ...],
    tenants: tuple[str, ...],
    queues: tuple[str, ...],
    expires: timedelta | None,
) -> None:
    """Create a token and print it once: Redis stores only its hash."""
    seconds = 0
    if expires is not None and (seconds := int(expires.total_seconds())) <= 0:
        raise click.BadParameter("a token is valid for at least a second", param_hint="--expires")
    made, text = Tokens(session.delayed).create(name, scopes, tenants, queues, seconds)
    session.emit({**asdict(made), "token": text})
    session.print(text)


@command("list", token)
def list_(session: Session) -> None:
    """Show all tokens."""
    found = Tokens(session.delayed).list()
    session.emit([asdict(each) for each in found])
    if not found:
        session.nothing("There are no tokens.")
    made = table("id", "name", "scopes", "tenants", "queues", "created (UTC)", "expires (UTC)")
    for each in found:
        made.add_row(
            each.id,
            plain(each.name),
            " ".join(each.scopes),
            plain(" ".join(each.tenants) or "all"),
            plain(" ".join(each.queues) or "all"),
            moment(from_ms(each.created * 1000)),
            moment(from_ms(each.expires * 1000)) if each.expires else "",
        )
    session.print(made)


@command("revoke", token)
@click.argument("id")
def revoke(session: Session, id: str) -> None:
    """Revoke a token by its id. Servers notice within 5 s."""
    gone = Tokens(session.delayed).revoke(id)
    session.emit({"revoked": gone})
    if not gone:
        session.nothing(f"There is no token {id}.")
    session.print(f"{id} is revoked.")
