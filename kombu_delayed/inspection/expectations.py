"""Messages that wait for an answer, and answers that come before them or too late.

A message that waits is a delayed one, due at its timeout, with its name as unique key. An answer
makes it ready with the answer in it, so that what a consumer gets is decided by one move.
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

#: Notes that one call reads.
PAGE_SIZE = 1_000

#: The header that is null in a message without an answer.
ANSWER_HEADER = "delayed_answer"


class Reply(NamedTuple):
    """What a move says, and the id of the message that it is about, or ""."""

    said: str
    id: str


@dataclass(frozen=True)
class Answer:
    """An answer, as JSON text, with an id of its own by which it is known again.

    `state` is "answered" or "failed".
    """

    id: str
    state: str
    text: str


@dataclass(frozen=True)
class Early:
    """What becomes of an answer whose question has yet to come: kept so long (0: not), so many."""

    kept_ms: int
    limit: int


class Settled(NamedTuple):
    """Whether anything may follow from a message; False: it is a copy of one that has ended.

    `answer` came when its time was over, and before that was settled.
    """

    may_follow: bool
    answer: str | None


class Note(NamedTuple):
    """What is kept of a name. Times are ms since the epoch.

    `state` is "early" (an answer without a question), "open", "answered", "failed", "timed_out" or
    "cancelled"; `id` that of the message, "" for "early". It is so since `at_ms`. `due_ms` is the
    timeout of what is open. A consumer has "open" ones without `is_waiting` that are due.
    """

    name: str
    state: str
    id: str
    at_ms: int
    until_ms: int
    due_ms: int | None = None
    is_waiting: bool = False


class Correlation:
    """What is expected in one queue. Every change is one script, and twice is safe.

    `kept_ms` says for each how long it is known afterwards how it ended.
    """

    def __init__(self, store: Store, queue: str) -> None:
        self.store = store
        self.queue = queue
        self._keys = store.keys(queue)

    def expect(self, name: str, entry: Entry, timeout_ms: int, kept_ms: int) -> Reply:
        """Let a message, whose header `delayed_answer` is null, wait for an answer.

        Says "open"; "answered" or "failed" where the answer was there, which makes the message
        ready; "refused" where another one is open under the name, whose id it gives; or how this
        very id has ended.
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
        """Give what is expected under a name its answer.

        Says "accepted"; "early" where nobody expects it yet and it is kept; "unknown" or "full"
        where it is not; "late" where another answer or the timeout was first. The same answer is
        told the same again.
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
        """Note how a message has ended, before anything follows from it.

        Waits for the replicas: what followed would be there after a failover, and the note not.
        """
        move, given = self.store.call(
            "settle", self.queue, name=name, id=id, state=state, kept_ms=kept_ms
        )
        found = move(self.store.send, **given)
        return Settled(bool(found), json.loads(found) if isinstance(found, bytes) else None)

    def cancel(self, name: str, kept_ms: int) -> Waiting | None:
        """Expect nothing any more; returns the message that waited, or None."""
        found = self.store.ask("cancel_expected", self.queue, name=name, kept_ms=kept_ms)
        if not found:
            return None
        return Waiting(found[0].decode(errors="surrogateescape"), open_kept(found[1]))

    def get(self, name: str) -> Note | None:
        """What is known of a name."""
        keys, run = self._keys, self.store.run
        note = run("HGET", keys.expectations, name)
        early = None if note else run("HGET", keys.answers, name)
        return next(self._notes([(name, note or early)], is_early=not note), None)

    def pages(self) -> Iterator[list[Note]]:
        """All that is kept, in bounded pages and in no order."""
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
        """Of the messages with these ids that are delayed."""
        if not ids:
            return {}
        records = self.store.records(self.queue, ids)
        return {
            id: open_kept(record).due_ms
            for id, record in zip(ids, records, strict=True)
            if record is not None
        }


def _read(text: bytes | None) -> dict[str, Any] | None:
    """A note; None: there is none, or it is damaged, which the doctor finds."""
    try:
        found = json.loads(text or b"")
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"state", "at_ms", "until_ms"} <= {*found} else None


def _reply(answer: tuple[bytes, bytes]) -> Reply:
    said, id = answer
    return Reply(said.decode(), id.decode(errors="surrogateescape"))
