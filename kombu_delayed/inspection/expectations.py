"""Messages that wait for an answer, and answers that arrive before them or too late.

A message that waits is a delayed one, due at its timeout, with its name as unique key. An answer
is put into it and makes it ready, so that one move decides what a consumer gets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..connection.commands import hash_pages
from ..message.envelope import open_kept
from ..store.store import Entry, Store
from .backlog import Waiting

#: How many notes one call reads.
PAGE_SIZE = 1_000

#: The header that is null in a message without an answer.
ANSWER_HEADER = "delayed_answer"


class Reply(NamedTuple):
    """The outcome of a move, and the id of the message that it is about, or ""."""

    said: str
    id: str


@dataclass(frozen=True)
class Answer:
    """An answer as JSON text, with its own id, by which a repeated answer is recognized.

    `state` is "answered" or "failed".
    """

    id: str
    state: str
    text: str


@dataclass(frozen=True)
class Early:
    """How long an answer is kept that arrives too early (0: not at all), and how many are."""

    kept_ms: int
    limit: int


class Settled(NamedTuple):
    """Whether a message may have effects; False: it is a copy of one that has ended.

    `answer` arrived after the timeout, but before the timeout was settled.
    """

    may_follow: bool
    answer: str | None


class Note(NamedTuple):
    """The record of an expectation or an early answer. Times are ms since the epoch.

    `state` is "early" (an answer without a question), "open", "answered", "failed", "timed_out" or
    "cancelled", since `at_ms`. `id` is that of the message, "" if "early". `due_ms` is the timeout
    of an "open" one. If that is due and not `is_waiting`, a consumer has it.
    """

    name: str
    state: str
    id: str
    at_ms: int
    until_ms: int
    due_ms: int | None = None
    is_waiting: bool = False


class Correlation:
    """The expectations of one queue. Every change is one script, and idempotent.

    `kept_ms` is how long the end of an expectation is remembered.
    """

    def __init__(self, store: Store, queue: str) -> None:
        self.store = store
        self.queue = queue
        self._keys = store.keys(queue)

    def expect(self, name: str, entry: Entry, timeout_ms: int, kept_ms: int) -> Reply:
        """Make a message, whose header `delayed_answer` is null, wait for an answer.

        Returns "open"; "answered" or "failed" if the answer was already there, which makes the
        message ready; "refused" and the id of another message if that is open under the name; or
        how this very id has ended.
        """
        move, given = self.store.call(
            "expect",
            self.queue,
            name=name,
            id=entry.id,
            record=entry.record,
            timeout_ms=timeout_ms,
            kept_ms=kept_ms,
        )
        return _reply(move(self.store.send, **given))

    def respond(self, name: str, answer: Answer, kept_ms: int, early: Early) -> Reply:
        """Answer the expectation with a name.

        Returns "accepted"; "early" if it is not expected yet and is kept; "unknown" or "full" if it
        is not kept; "late" if another answer or the timeout was first. A repeated answer gets the
        same reply again.
        """
        move, given = self.store.call(
            "respond",
            self.queue,
            name=name,
            answer_id=answer.id,
            state=answer.state,
            answer=json.dumps(answer.text),
            kept_ms=kept_ms,
            early_ms=early.kept_ms,
            early_limit=early.limit,
        )
        return _reply(move(self.store.send, **given))

    def settle(self, name: str, id: str, state: str, kept_ms: int) -> Settled:
        """Record how a message has ended, before anything follows from it.

        Waits for the replicas: otherwise a failover might keep the effects but not the note.
        """
        move, given = self.store.call(
            "settle", self.queue, name=name, id=id, state=state, kept_ms=kept_ms
        )
        found = move(self.store.send, **given)
        return Settled(bool(found), json.loads(found) if isinstance(found, bytes) else None)

    def cancel(self, name: str, kept_ms: int) -> Waiting | None:
        """Cancel an expectation. Returns the message that waited, or None."""
        found = self.store.ask("cancel_expected", self.queue, name=name, kept_ms=kept_ms)
        if not found:
            return None
        return Waiting(found[0].decode(errors="surrogateescape"), open_kept(found[1]))

    def get(self, name: str) -> Note | None:
        """Return what is known of a name, or None."""
        keys, run = self._keys, self.store.run
        note = run("HGET", keys.expectations, name)
        early = None if note else run("HGET", keys.answers, name)
        return next(self._notes([(name, note or early)], is_early=not note), None)

    def pages(self) -> Iterator[list[Note]]:
        """Yield all notes, in bounded pages and in no order."""
        keys = self._keys
        for key, is_early in ((keys.expectations, False), (keys.answers, True)):
            for page in hash_pages(self.store.run, key, PAGE_SIZE):
                found = [(name.decode(), text) for name, text in page]
                yield [*self._notes(found, is_early)]

    def _notes(self, found: Sequence[tuple[str, bytes | None]], is_early: bool) -> Iterator[Note]:
        facts = [(name, each) for name, text in found if (each := _read(text))]
        open_ids = [each["id"] for _, each in facts if each["state"] == "open"]
        waiting = self._due_times(open_ids)
        for name, each in facts:
            state, id = each.get("ends") or each["state"], each.get("id", "")
            due_ms = waiting.get(id) if state == "open" else None
            yield Note(
                name,
                "early" if is_early else state,
                id,
                int(each["at_ms"]),
                int(each["until_ms"]),
                each.get("due_ms") if due_ms is None else due_ms,
                due_ms is not None,
            )

    def _due_times(self, ids: list[str]) -> dict[str, int]:
        """Return the due times of those messages with these ids that are delayed."""
        if not ids:
            return {}
        records = self.store.records(self.queue, ids)
        return {
            id: open_kept(record).due_ms
            for id, record in zip(ids, records, strict=True)
            if record is not None
        }


def _read(text: bytes | None) -> dict[str, Any] | None:
    """Return a note, or None if there is none or it is damaged, which the doctor finds."""
    try:
        found = json.loads(text or b"")
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"state", "at_ms", "until_ms"} <= {*found} else None


def _reply(answer: tuple[bytes, bytes]) -> Reply:
    said, id = answer
    return Reply(said.decode(), id.decode(errors="surrogateescape"))
