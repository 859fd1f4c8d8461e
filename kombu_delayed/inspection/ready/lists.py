"""The ready messages of a queue, for operators: read, drop, change.

They are in Kombu's own lists, shared with workers of the stock transport. So they are found by
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

#: How many messages, and bytes, one call looks at.
PAGE_SIZE, PAGE_BYTES = 500, 2_000_000

#: How far from its last known place, on both sides, the same call looks for a message.
WINDOW = 500

#: How far from its expected place a message is looked for by its id.
AROUND = 200

#: How many messages are remembered, as new ones may push them into the next page.
SEEN = 10_000

#: Ids that every JSON encoder writes as they are, and how many of them a call looks for.
PLAIN, MOST_NEEDLES = re.compile(r"[A-Za-z0-9 _.,:;@+=-]+"), 10


class Ready(NamedTuple):
    """A ready message: its list, its place when it was read, and its text.

    `compressed` is the text as the list has it if that is compressed, otherwise empty.
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

    `on_change` is called with queue, step, id and new text of each message that is changed. The
    text is None if the message was taken from its place.
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
        self._lists = dict(zip(keys.priority_steps, keys.ready, strict=True))
        self._dropped = 0

    def pages(self, needles: Sequence[str] = ()) -> Iterator[list[Ready]]:
        """Yield all ready messages in bounded pages: the most urgent first, then the latest.

        With `needles`, only those with one of them in their text. A message that is added meanwhile
        may be missing, and if others drop or put back messages meanwhile, any other may be.
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
                # The others have moved up by what the caller has dropped.
                start = max(start + looked_at - (self._dropped - before), 0)

    @property
    def steps(self) -> list[int]:
        """The priority steps that have a list, the most urgent first."""
        return [*self._lists]

    def page(
        self, step: int, start: int, needles: Sequence[str | bytes] = ()
    ) -> tuple[int, bool, list[Ready]]:
        """Return how many messages of a list were looked at, whether there are more, and them."""
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
        """Return a ready message, given its place and its text as the list has it."""
        text = self.store.readable(self.queue, kept)
        return Ready(step, at, text, b"" if text is kept else kept)

    def find_call(self, step: int, newest: str, looks: Sequence[tuple[int, str]]) -> Call:
        """Return the script that finds messages by the places they had when `newest` was added.

        `looks` are places, each with the message's id as JSON.
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
        """Drop messages of a page. Returns whether each was still ready."""
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
        """Yield places where a message may be now: new messages may have moved it on."""
        at = message.at
        for start, stop in ((at, at + SEEN), (max(at - SEEN, 0), at), (at + SEEN, math.inf)):
            has_more = True
            while has_more and start < stop:
                looked_at, has_more, page = self.page(message.step, start, [message.kept])
                yield from (each.at for each in page if each.kept == message.kept)
                start += looked_at

    def expand(self, messages: Sequence[Ready]) -> int:
        """Replace messages of a page by their uncompressed texts. Returns how many."""
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

        Returns False if it is not ready any more.
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
    """Return texts of which each message with one of these ids contains one; empty if unknown."""
    are_plain = all(PLAIN.fullmatch(id) for id in ids)
    return [*ids] if are_plain and len(ids) <= MOST_NEEDLES else []


def id_of(message: bytes) -> str:
    """Return the task id of a ready message; empty if it has none that can be read."""
    try:
        return open_envelope(message, 0).id
    except MessageError:
        return ""
