"""`expectations list`, `show`, `respond`, `fail`, `cancel`: answers that tasks wait for."""

from __future__ import annotations

import json
from heapq import nsmallest
from typing import Any

import click
from click_didyoumean import DYMGroup  # type: ignore[import-untyped]
from rich.table import Table

from celery_ext.control.answers.answering import LATE, UNKNOWN
from celery_ext.control.answers.expectations import ExpectationInfo
from celery_ext.tasks.formatting import facts_table, moment, number, plain, table

from ..criteria import TEXT, limit_option
from ..session import Session, command

STATE_STYLES = {
    "open": "cyan",
    "early": "yellow",
    "answered": "green",
    "failed": "red",
    "timed_out": "red",
    "cancelled": "dim",
}

tenant_option = click.option("--tenant", type=TEXT, help="The tenant that the key belongs to.")
id_option = click.option(
    "--id",
    "answer_id",
    type=TEXT,
    help="Id of the answer: repeating it returns the same outcome.",
)


@click.group("expectations", cls=DYMGroup)
def expectations() -> None:
    """Show the answers that tasks wait for, or give an answer."""


@command("list", expectations)
@tenant_option
@click.option(
    "--state", type=click.Choice([*STATE_STYLES]), help="Only expectations in this state."
)
@limit_option(20)
def list_(session: Session, tenant: str | None, state: str | None, limit: int) -> None:
    """Show open and recent expectations, the next timeouts first."""
    with session.progress("Reading") as advance:
        found = []
        for info in session.delayed.expectations.list(tenant):
            advance(1)
            if state in (None, info.state):
                found.append(info)
    shown = nsmallest(limit or len(found), found, key=_order)
    if session.as_json:
        session.emit_each(info.as_dict() for info in shown)
    elif shown:
        session.print(_table(shown))
    if not found:
        session.nothing("Nothing is expected.")
    if len(shown) < len(found):
        session.print(f"The first {len(shown)} of {number(len(found))}; --limit 0 shows all.")


def _order(info: ExpectationInfo) -> tuple[bool, float]:
    return info.due is None, info.due.timestamp() if info.due else -info.at.timestamp()


def _table(infos: list[ExpectationInfo]) -> Table:
    made = table("state", "since (UTC)", "timeout (UTC)", "tenant", "key")
    made.columns[4].no_wrap, made.columns[4].overflow = False, "fold"
    for info in infos:
        made.add_row(
            plain(info.state, style=STATE_STYLES[info.state]),
            moment(info.at),
            moment(info.due),
            plain(info.tenant or ""),
            plain(info.key),
        )
    return made


@command("show", expectations)
@click.argument("key")
@tenant_option
def show(session: Session, key: str, tenant: str | None) -> None:
    """Show the expectation of a key."""
    info = session.delayed.expectations.get(key, tenant)
    session.emit(info.as_dict() if info else None)
    if info is None:
        session.nothing(f"Nothing is known of the key {key}.")
    made = facts_table()
    for name, value in info.as_dict().items():
        if value is not None:
            made.add_row(name, plain(value))
    session.print(made)


@command("respond", expectations)
@click.argument("key")
@click.argument("payload", default="null")
@tenant_option
@id_option
def respond(session: Session, key: str, payload: str, **named: Any) -> None:
    """Give an answer: a payload in JSON."""
    try:
        content = json.loads(payload)
    except ValueError as error:
        raise click.UsageError(f"the payload is not JSON: {error}") from error
    _report(session, key, session.delayed.expectations.respond(key, content, **named))


@command("fail", expectations)
@click.argument("key")
@click.argument("error")
@tenant_option
@id_option
def fail(session: Session, key: str, error: str, **named: Any) -> None:
    """Report that there will be no answer, and why."""
    _report(session, key, session.delayed.expectations.fail(key, error, **named))


def _report(session: Session, key: str, outcome: str) -> None:
    session.emit({"key": key, "outcome": outcome})
    if outcome == LATE:
        session.nothing(f"Too late for {key}: another answer, or the timeout, was first.")
    if outcome == UNKNOWN:
        session.nothing(f"No task expects an answer under {key}.")
    session.print(f"The answer for {key} is {outcome}.")


@command("cancel", expectations)
@click.argument("key")
@tenant_option
def cancel(session: Session, key: str, tenant: str | None) -> None:
    """Cancel an expectation. A later answer is late."""
    done = session.delayed.expectations.cancel(key, tenant)
    session.emit({"key": key, "cancelled": done})
    if not done:
        session.nothing(f"Nothing is expected under {key}.")
    session.print(f"Nothing is expected under {key} any more.")
