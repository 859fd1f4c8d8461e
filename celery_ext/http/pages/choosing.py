"""What a form of several tasks or letters means: those that were ticked, or all of a search."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kombu_delayed.store.store import chunks

from ..api import cursors
from ..auth.sessions import new_secret
from .visit import Form, Shown

T = TypeVar("T")

#: How many one form changes.
MOST = 10_000

#: How long one form searches for the items that match.
LOOK_SECONDS = 10.0

#: Fields of a form, with what is wrong about each.
NO_ERRORS: Mapping[str, str] = {}

#: By shard.
Chosen = dict[str, list[T]]

#: A page of a search: how many at the most, from which cursor on.
Search = Callable[[int, str | None], tuple[Sequence[tuple[str, T]], str | None]]

#: The items with some ids in a queue, by shard.
Find = Callable[[str, Sequence[str]], Iterable[tuple[str, Sequence[T]]]]


def ticked(form: Form) -> Iterator[tuple[str, str]]:
    """Queue and id of each that was chosen by itself."""
    for name in form.all("chosen")[:MOST]:
        queue, id = cursors.read(name, str, str)
        yield queue, id


def choose(
    form: Form,
    search: Search[T],
    find: Find[T],
) -> tuple[Chosen[T], bool]:
    """The items that a form means, by shard, and whether these are all of them."""
    if form.one("all"):
        return _choose_all(search)
    return by_name(ticked(form), find), True


def by_name(names: Iterable[tuple[str, str]], find: Find[T]) -> Chosen[T]:
    """The items with these queues and ids, by shard."""
    ids: dict[str, list[str]] = {}
    for queue, id in names:
        ids.setdefault(queue, []).append(id)
    chosen: Chosen[T] = {}
    for queue, each in ids.items():
        for shard, found in find(queue, each):
            chosen.setdefault(shard, []).extend(found)
    return chosen


def _choose_all(search: Search[T]) -> tuple[Chosen[T], bool]:
    chosen: Chosen[T] = {}
    until, cursor, count = time.monotonic() + LOOK_SECONDS, None, 0
    while True:
        found, cursor = search(min(1_000, MOST - count), cursor)
        for shard, each in found:
            chosen.setdefault(shard, []).append(each)
        count += len(found)
        if cursor is None:
            return chosen, True
        if count >= MOST or time.monotonic() > until:
            return chosen, False


def parts(chosen: Chosen[T]) -> Iterator[tuple[str, list[T]]]:
    """As many of a shard as one call takes."""
    for shard, found in chosen.items():
        yield from ((shard, [*part]) for part in chunks(found))


def among(form: Form, count: int) -> int:
    """How many its preview has shown, or as many as were found now, if these are more."""
    shown = form.one("seen")
    return max(count, int(shown) if len(shown) < 9 and shown.isdecimal() else 0)


def audited(form: Form, what: str, given: Mapping[str, str], count: int) -> str:
    """What a form means, for the audit log."""
    return (
        f"{count} {what} with {given}"
        if form.one("all")
        else ",".join(id for _, id in ticked(form))
    )


def preview(
    form: Form, verbs: Mapping[str, str], names: Iterable[str], kinds: Counter[Any], is_all: bool
) -> Shown:
    """What all previews show: the name of each chosen item in forms, and its kind."""
    verb = form.verb(verbs)
    return {
        "verb": verb,
        "word": verbs[verb],
        "form": form,
        "names": [] if form.one("all") else list(names),
        "count": kinds.total(),
        "is_all": is_all,
        "kinds": kinds.most_common(10),
        "once": new_secret(),
    }
