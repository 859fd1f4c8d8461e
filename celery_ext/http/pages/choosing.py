"""The tasks or letters that a form selects: those that were ticked, or all of a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kombu_delayed.store.store import chunks

from ..api import cursors
from ..auth.tokens import new_secret
from .sorting import read_first
from .visit import Form, Shown

T = TypeVar("T")

#: How many items one form changes at most.
MOST = 10_000

#: How long one form searches for the items that match.
LOOK_SECONDS = 10.0

#: The invalid fields of a form, with their errors: none.
NO_ERRORS: Mapping[str, str] = {}

#: The selected items, by shard.
Chosen = dict[str, list[T]]

#: Returns a page of a search and the next cursor, for a maximum size and a cursor.
Search = Callable[[int, str | None], tuple[Sequence[tuple[str, T]], str | None]]

#: Returns the items with some ids in a queue, by shard.
Find = Callable[[str, Sequence[str]], Iterable[tuple[str, Sequence[T]]]]


def ticked(form: Form) -> Iterator[tuple[str, str]]:
    """The queue and id of each item that was ticked."""
    for name in form.all("chosen")[:MOST]:
        queue, id = cursors.read(name, str, str)
        yield queue, id


def choose(
    form: Form,
    search: Search[T],
    find: Find[T],
) -> tuple[Chosen[T], bool]:
    """The items that a form selects, by shard, and whether these are all of them."""
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
    found, has_more = read_first(search, MOST, LOOK_SECONDS)
    chosen: Chosen[T] = {}
    for shard, each in found:
        chosen.setdefault(shard, []).append(each)
    return chosen, not has_more


def parts(chosen: Chosen[T]) -> Iterator[tuple[str, list[T]]]:
    """The items of each shard in parts that one call can take."""
    for shard, found in chosen.items():
        yield from ((shard, [*part]) for part in chunks(found))


def among(form: Form, count: int) -> int:
    """How many items the form's preview has shown, or how many there are now, if these are more."""
    shown = form.one("seen")
    return max(count, int(shown) if len(shown) < 9 and shown.isdecimal() else 0)


def audited(
    form: Form, what: str, given: Mapping[str, str], goal: Mapping[str, str], count: int
) -> str:
    """The selection of a form, a search or ids, and its goal, as text for the audit log.

    The log may cut off the end of many ids.
    """
    if form.one("all"):
        return f"{count} {what} with { {**given, **goal} }"
    ids = ",".join(id for _, id in ticked(form))
    if count == 1 and not goal:
        return ids
    return f"{count} {what}{f' with {goal}' if goal else ''}: {ids}"


def preview(
    form: Form, verbs: Mapping[str, str], names: Iterable[str], kinds: Counter[Any], is_all: bool
) -> Shown:
    """The values that all previews need: the names of the items in forms, their kinds, and more."""
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
