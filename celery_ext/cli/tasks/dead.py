"""`dead list`, `show`, `replay`, `purge`: the dead letters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import click
from click_didyoumean import DYMGroup  # type: ignore[import-untyped]
from rich.table import Table

from celery_ext.app.commands import all_of
from celery_ext.tasks.dead_task import DeadTask
from celery_ext.tasks.formatting import (
    call,
    facts_table,
    moment,
    one_line,
    plain,
    table,
    tasks_word,
)
from celery_ext.tasks.progress import Progress

from ..criteria import asking_options, ids_argument, limit_option, queue_option, task_option
from ..session import Session, command
from ..times import TIME

#: How many of the selected letters are shown before the question.
SAMPLE_SIZE = 10

#: How many letters one step of the progress bar stands for.
PART_SIZE = 1_000


@click.group("dead", cls=DYMGroup)
def dead() -> None:
    """Show, replay or purge dead letters."""


def _letters(
    session: Session,
    queue: str | None,
    task: str | None,
    advance: Progress = lambda count: None,
) -> Iterator[DeadTask]:
    for letter in session.delayed.dead.list(queue):
        if task is None or fnmatchcase(letter.info.task, task):
            yield letter
        advance(1)


@command("list", dead, despite_nodes_down=True)
@queue_option
@task_option
@limit_option(20)
def list_(session: Session, queue: str | None, task: str | None, limit: int) -> None:
    """Show dead letters, by queue, the oldest first."""
    found = _letters(session, queue, task)
    shown = islice(found, limit) if limit else found
    if session.as_json:
        count = session.emit_each(map(_data, shown))
    else:
        letters = list(shown)
        count = len(letters)
        if letters:
            session.print(letters_table(letters))
    if not count:
        session.nothing("There are no dead letters.")
    if limit and count == limit and next(found, None) is not None:
        session.print(f"The first {count}; there are more, --limit 0 shows all.")


@command("show", dead)
@click.argument("id")
@queue_option
def show(session: Session, id: str, queue: str | None) -> None:
    """Show a dead letter."""
    letter = session.delayed.dead.show(id, queue)
    session.emit(_data(letter) if letter else None)
    if letter is None:
        session.nothing(f"There is no dead letter {id}.")
    made = facts_table()
    for name, value in _data(letter).items():
        if name != "failures" and value not in (None, "", 0):
            made.add_row(name.replace("_", " "), plain(value))
    for failure in letter.failures:
        where = f"{moment(failure.at)} UTC on {failure.worker}: {failure.error}"
        made.add_row(f"attempt {failure.attempt}", plain(where, style="red"))
        for line in failure.traceback.splitlines():
            made.add_row("", plain(line, style="dim"))
    session.print(made)


@dataclass(frozen=True)
class Choice:
    """Which letters are selected, and whether to ask."""

    ids: tuple[str, ...]
    whole: bool
    task: str | None
    queue: str | None
    yes: bool
    dry_run: bool

    def __post_init__(self) -> None:
        if bool(self.ids) + self.whole + (self.task is not None) != 1:
            raise click.UsageError("Give ids, --task or --all.")

    def count(self, session: Session) -> int:
        if self.ids:
            return len(set(self.ids))
        store = session.delayed.store
        return sum(store.dead.count(name) for name in session.delayed.shards(self.queue))

    def letters(
        self, session: Session, advance: Progress = lambda count: None
    ) -> Iterator[DeadTask]:
        if not self.ids:
            yield from _letters(session, self.queue, self.task, advance)
            return
        for id in dict.fromkeys(self.ids):
            if (letter := session.delayed.dead.show(id, self.queue)) is not None:
                yield letter
            advance(1)


_choosing = all_of(
    ids_argument,
    click.option("--all", "whole", is_flag=True, help="Select all dead letters."),
    task_option,
    queue_option,
    asking_options,
)


@command("replay", dead)
@click.option("--at", type=TIME, help="When to run, such as +2h. Default: now.")
@_choosing
def replay(session: Session, at: datetime | None, **given: Any) -> None:
    """Replay dead letters: give them another try.

    Their deliveries are counted from zero.
    """
    change = partial(session.delayed.dead.replay, at=at)
    _run(session, "Replay", "replayed", change, Choice(**given))


@command("purge", dead)
@_choosing
def purge(session: Session, **given: Any) -> None:
    """Delete dead letters."""
    _run(session, "Purge", "purged", session.delayed.dead.purge, Choice(**given))


def _run(
    session: Session,
    verb: str,
    past: str,
    change: Callable[..., int],
    choice: Choice,
) -> None:
    # Selected now, so that letters that are buried meanwhile are not included.
    with session.progress("Reading", choice.count(session)) as advance:
        chosen = []
        for letter in choice.letters(session, advance):
            chosen.append((letter.queue, letter.letter.id))
    if chosen and (choice.dry_run or not (choice.yes or choice.ids)):
        _preview(session, verb, len(chosen), choice)
    changed = 0
    if not choice.dry_run:
        with session.progress(verb, len(chosen)) as advance:
            for queue, ids in _parts(chosen):
                changed += change(ids, queue=queue)
                advance(len(ids))
    session.emit({"dry_run": choice.dry_run, "matched": len(chosen), "changed": changed})
    if changed:
        session.print(f"{tasks_word(changed)} {'is' if changed == 1 else 'are'} {past}.")
    missing = len(set(choice.ids)) - len(chosen) if choice.ids else 0
    if missing or not chosen:
        session.nothing(f"{missing} not found." if chosen else "There are no such dead letters.")


def _parts(chosen: list[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    for queue, letters in groupby(chosen, key=itemgetter(0)):
        ids = [id for _, id in letters]
        for at in range(0, len(ids), PART_SIZE):
            yield queue, ids[at : at + PART_SIZE]


def _preview(session: Session, verb: str, matched: int, choice: Choice) -> None:
    """Show the selected letters, and ask unless it is a dry run."""
    if not (session.as_json and choice.dry_run):
        out = session.err if session.as_json else session.out
        sample = list(islice(choice.letters(session), SAMPLE_SIZE))
        more = "" if matched <= len(sample) else ", such as"
        out.print(letters_table(sample, f"{verb} {tasks_word(matched)}{more}:"), "")
    if not choice.dry_run:
        session.confirm(f"{verb} {tasks_word(matched)}?")


def letters_table(letters: list[DeadTask], title: str | None = None) -> Table:
    """Dead letters with their reasons; ids are never cut."""
    made = table("buried (UTC)", "queue", "task", "reason", "id", title=title)
    made.columns[4].overflow = "fold"
    for letter in letters:
        made.add_row(
            moment(letter.at),
            plain(letter.queue),
            call(letter.info),
            one_line(plain(letter.letter.reason, style="red")),
            plain(letter.info.id, style="dim"),
        )
    return made


def _data(letter: DeadTask) -> dict[str, Any]:
    known = letter.info.as_dict()
    names = ("id", "task", "args", "kwargs", "queue", "reason", "consumer", "tenant")
    return {
        **{name: known[name] for name in names},
        "letter_id": letter.letter.id,
        "at": letter.at.isoformat(),
        "deliveries": letter.letter.deliveries,
        "failures": [asdict(failure) for failure in letter.failures],
    }
