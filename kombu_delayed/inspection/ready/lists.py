"""The ready messages of a queue, for who looks after them: read, drop, change.

They are in Kombu's own lists, which workers of the stock transport share. So they are found by
reading, and by comparing whole texts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, islice
from typing import NamedTuple

from ...connection.commands import numbers, pairs
from ...errors import MessageError
from ...message.envelope import open_envelope, step_char
from ...store.calls.scripts import Call
from ...store.store import Store

#: Messages, and bytes, that one call looks at.
PAGE_SIZE, PAGE_BYTES = 500, 2_000_000

#: So far from where it was read, on both sides, the same call looks for a message.
WINDOW = 500

#: So far from where it ought to be a message is looked for by its id.
AROUND = 200

#: So many messages are remembered, which senders may push back into the next page.
SEEN = 10_000

#: Ids that every JSON encoder writes as they are, and how many of them a call looks for.
PLAIN, MOST_NEEDLES = re.compile(r"[A-Za-z0-9 _.,:;@+=-]+"), 10


class Ready(NamedTuple):
    """A ready message: its list, its place when it was read, and its text.

    `compressed` is the text as the list has it, where that is compressed, and else empty.
    """

    step: int
    at: int
    message: bytes
    compressed: bytes = b""

    @property
    def kept(self) -> bytes:
        """Its text as the list has it."""
        return self.compressed or self.message


class ReadyLists:
    """The ready lists of one queue, or one shard. Every change is one script.

    `on_change` is called with queue, step, id and new text of each message that is changed; None:
    it was taken from its place.
    """

    def __init__(
        self,
        store: Store,
        queue: str,
        on_change: Callable[[str, int, str, bytes | None], None] = lambda *change: None,
    ) -> None:
        self.store = store
        self.queue = queue
        self._on_change = on_change
        keys = store.keys(queue)
        self._lists = {
            ord(step) - 48: key for step, key in zip(keys.steps, keys.ready, strict=True)
        }
        self._dropped = 0

    def pages(self, needles: Sequence[str] = ()) -> Iterator[list[Ready]]:
        """All ready messages, a bounded page a call: the most urgent first, then the latest.

        Only those with one of `needles` in their text, if there are some. What comes meanwhile may
        be in a page or not. What others drop or put back meanwhile may let one be passed over.
        """
        for step in self._lists:
            start, seen, has_more = 0, dict[int, None](), True
            while has_more:
                before = self._dropped
                looked_at, has_more, page = self.page(step, start, needles)
                fresh = [each for each in page if hash(each.kept) not in seen]
                seen.update((hash(each.kept), None) for each in fresh)
                for old in [*islice(seen, max(len(seen) - SEEN, 0))]:
                    del seen[old]
                yield fresh
                # What the caller has dropped has let the others move up.
                start = max(start + looked_at - (self._dropped - before), 0)

    @property
    def steps(self) -> list[int]:
        """The priority steps that have a list, the most urgent first."""
        return [*self._lists]

    def page(
        self, step: int, start: int, needles: Sequence[str | bytes] = ()
    ) -> tuple[int, bool, list[Ready]]:
        """A bounded part of one list: how many were looked at, whether there are more, which."""
        looked_at, more, *found = self.store.ask(
            "ready_page",
            self.queue,
            list=self._lists[step],
            start=start,
            limit=PAGE_SIZE,
            limit_bytes=PAGE_BYTES,
            needles=needles,
        )
        return (
            looked_at,
            bool(more),
            [self.ready(step, int(at), message) for at, message in pairs(found)],
        )

    def ready(self, step: int, at: int, kept: bytes) -> Ready:
        """A ready message by its place and its text, as the list has it."""
        text = self.store.readable(self.queue, kept)
        return Ready(step, at, text, b"" if text is kept else kept)

    def find_call(self, step: int, newest: str, looks: Sequence[tuple[int, str]]) -> Call:
        """The script that finds messages by the places they had when another was the newest.

        `looks` are places, with a text that is in each message.
        """
        return self.store.call(
            "ready_find",
            self.queue,
            list=self._lists[step],
            newest=newest,
            limit=PAGE_SIZE,
            around=AROUND,
            looks=[part for look in looks for part in look],
        )

    def withdraw(self, messages: Sequence[Ready]) -> list[bool]:
        """Drop messages of a page; whether each was still ready."""
        gone = [False] * len(messages)
        for step in {each.step for each in messages}:
            places = [n for n, each in enumerate(messages) if each.step == step]
            first = min(messages[n].at for n in places)
            span = max(messages[n].at for n in places) - first
            texts = [messages[n].kept for n in places]
            for n, count in zip(places, self._withdraw(step, first, span, texts), strict=True):
                gone[n] = bool(count) or self._withdraw_elsewhere(messages[n])
        for each in compress(messages, gone):
            self._was_changed(each, None)
        return gone

    def _was_changed(self, message: Ready, text: bytes | None) -> None:
        self._dropped += int(text is None)
        self._on_change(self.queue, message.step, id_of(message.message), text)

    def _withdraw(self, step: int, start: int, span: int, texts: Sequence[bytes]) -> list[int]:
        answer = self.store.ask(
            "withdraw",
            self.queue,
            list=self._lists[step],
            start=start,
            limit=span + 1,
            window=WINDOW,
            messages=texts,
        )
        return numbers(answer)

    def _withdraw_elsewhere(self, message: Ready) -> bool:
        places = self._places(message)
        return any(self._withdraw(message.step, at, 0, [message.kept]) == [1] for at in places)

    def _places(self, message: Ready) -> Iterator[int]:
        """Where it may be now, as long as the caller asks: senders may have moved it on."""
        at = message.at
        for start, stop in ((at, at + SEEN), (max(at - SEEN, 0), at), (at + SEEN, math.inf)):
            has_more = True
            while has_more and start < stop:
                looked_at, has_more, page = self.page(message.step, start, [message.kept])
                yield from (each.at for each in page if each.kept == message.kept)
                start += looked_at

    def expand(self, messages: Sequence[Ready]) -> int:
        """Write messages of a page as they were before they were compressed; returns how many."""
        if not messages:
            return 0
        first = min(each.at for each in messages)
        return int(
            self.store.ask(
                "expand",
                self.queue,
                list=self._lists[messages[0].step],
                start=first,
                limit=max(each.at for each in messages) - first + 1,
                window=WINDOW,
                texts=[text for each in messages for text in (each.kept, each.message)],
            )
        )

    def amend(
        self,
        message: Ready,
        id: str,
        text: bytes,
        *,
        step: int | None = None,
        due_ms: int | None = None,
        is_first: bool = False,
    ) -> bool:
        """Give a message another text, and a step, a due time or the first place if they are given.

        False: it is not ready any more.
        """
        how = "first" if is_first else "stay" if step in (None, message.step) else "behind"
        record = step_char(message.step if step is None else step).encode() + text

        def amend(at: int) -> bool:
            return bool(
                self.store.ask(
                    "amend",
                    self.queue,
                    list=self._lists[message.step],
                    start=at,
                    limit=1,
                    window=WINDOW,
                    expected=message.kept,
                    id=id,
                    due="" if due_ms is None else due_ms,
                    record=record,
                    how=how,
                )
            )

        is_amended = amend(message.at) or any(map(amend, self._places(message)))
        if is_amended:
            self._was_changed(message, text if due_ms is None and how == "stay" else None)
        return is_amended


def needles_of(ids: Sequence[str]) -> list[str]:
    """Texts of which every message with one of these ids has one; none where that is not known."""
    are_plain = all(PLAIN.fullmatch(id) for id in ids)
    return [*ids] if are_plain and len(ids) <= MOST_NEEDLES else []


def id_of(message: bytes) -> str:
    """The task id of a ready message; empty where it has none that can be read."""
    try:
        return open_envelope(message, 0).id
    except MessageError:
        return ""
