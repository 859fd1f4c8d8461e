"""`doctor`: finds problems and repairs them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from kombu_delayed.inspection.doctor import (
    Finding,
    examine_format,
    examine_queues,
    examine_server,
    examine_types,
    upgrade,
)
from kombu_delayed.inspection.doctor.examination import HARMLESS
from kombu_delayed.store.calls.shards import label, queue_of

from ..errors import QueryError
from ..tasks.formatting import number, plain, queue_data, queues_word, table
from .checkup import Check, check_up, checks_table
from .criteria import queue_option
from .session import Session, command, those_that_answer


@command("doctor", doubts_queue=False)
@queue_option
@click.option("--fix", is_flag=True, help="Repair what can be repaired.")
@click.option(
    "--upgrade",
    "upgrades",
    is_flag=True,
    help="Convert the data to the format of this version. Processes of older versions stop.",
)
def doctor(session: Session, queue: str | None, fix: bool, upgrades: bool) -> None:
    """Find problems, and repair them with --fix.

    Checks versions, the server, its settings and clock, and whether workers consume all queues in
    time with the same policies. Then it checks leases and wake tokens, and whether the backlog, the
    dead letters and the names of messages are consistent.
    You may run it beside producers and workers. The exit code is 1 if a problem was found and
    was not repaired.
    """
    delayed, down = (session.delayed, []) if upgrades else those_that_answer(session.delayed)
    store = delayed.store
    if queue:
        delayed.check_queue(queue)
    names = delayed.shards(queue)
    if down and not names:
        raise QueryError(f"no node with these queues answers: {', '.join(down)}")
    if upgrades:
        upgrade(store, delayed.shards(None))
        session.print("All messages have the newest format.")
    nodes = Finding("nodes", count=len(down), examples=down) if down else None
    findings = [each for each in (nodes, examine_server(store), examine_format(store)) if each]
    foreign = [each for name in names if (each := examine_types(store, name))]
    if foreign:  # the rest would fail at them
        findings, checks = [*findings, *foreign], list[Check]()
    else:
        total = sum(2 * store.delayed_count(name) for name in names)
        with session.progress("Repairing" if fix else "Examining", total) as advance:
            findings += examine_queues(store, names, fix=fix, progress=advance)
        checks = [*check_up(delayed, queue, findings)]
    left = [each for each in findings if each.is_wrong]
    queues = [*dict.fromkeys(map(queue_of, names))]
    session.emit(
        {
            "healthy": not left,
            "queues": queues,
            "findings": [*map(_data, findings)],
            "checks": [{"is_right": each.is_right, **asdict(each)} for each in checks],
        }
    )
    if checks:
        session.print(checks_table(checks))
    _print(session, findings, len(queues), fix)
    if left:
        session.exit(1)


def _print(session: Session, findings: list[Finding], count: int, fix: bool) -> None:
    queues = [each for each in findings if each.queue]
    wrong = [each for each in queues if each.kind not in HARMLESS]
    harmless = [each for each in queues if each.kind in HARMLESS]
    if wrong:
        session.print(_table(wrong, "what is wrong"))
    else:
        session.print(Text("✓  ", "green").append(f"Nothing is wrong in {queues_word(count)}."))
    if harmless:
        session.print(_table(harmless, "to know, and harmless"))
    if not any(each.fixed < each.count and each.remedy for each in wrong):
        return
    if fix:
        session.print("A consumer that is not repaired takes no wake tokens: restart it.")
    else:
        session.print("celery delayed doctor --fix repairs this.")


def _table(findings: list[Finding], what: str) -> Any:
    made = table("queue", "", what, "such as")
    made.columns[1].justify = "right"
    for column in made.columns[2:]:
        column.no_wrap, column.overflow = False, "fold"
    if any(each.fixed for each in findings):
        made.add_column("repair", no_wrap=True, style="green")
    for each in findings:
        example = plain(each.examples[0] + (", …" if each.count > 1 else ""), style="dim")
        repair = each.remedy if each.fixed else ""
        made.add_row(plain(label(each.queue)), number(each.count), each.meaning, example, repair)
    return made


def _data(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        **queue_data(finding.queue or None),
        "count": finding.count,
        "fixed": finding.fixed,
        "meaning": finding.meaning,
        "examples": finding.examples,
    }
