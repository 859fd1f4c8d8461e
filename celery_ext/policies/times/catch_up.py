"""Policies for tasks that are late, for example after an outage."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kombu_delayed.consumer.policy.decisions import Decision, Delay, Drop
from kombu_delayed.message.durations import exact_text

from ..message import Message
from ..policy import RUN, Policy, PolicyError, length_ms


class DropOlder(Policy):
    """Drops tasks that are later than this: `DropOlder("1h")`.

    After a pause of the queue it counts from the end of the pause.
    """

    needs_first_due = True

    def __init__(self, than: Any) -> None:
        self.than_ms = length_ms("DropOlder", than)

    def __repr__(self) -> str:
        return f"DropOlder({exact_text(self.than_ms)!r})"

    def decide(self, message: Message) -> Decision:
        if message.overdue_ms > self.than_ms:
            return Drop(f"older than {exact_text(self.than_ms)}")
        return RUN


class Spread(Policy):
    """Spreads tasks that are later than `after` over a period: `Spread("30m", after="1m")`.

    Each message is delayed once, for a random time.
    """

    needs_first_due = True
    mark = "spread"

    def __init__(self, over: Any, *, after: Any = "1m") -> None:
        self.over_ms = length_ms("Spread", over)
        self.after_ms = length_ms("Spread(after=…)", after)

    def __repr__(self) -> str:
        return f"Spread({exact_text(self.over_ms)!r}, after={exact_text(self.after_ms)!r})"

    def decide(self, message: Message) -> Decision:
        """Delay a late message that this policy has not delayed yet. Others run."""
        if message.late_ms <= self.after_ms or self.mark in message.marks:
            return RUN
        until_ms = message.now_ms + random.randrange(self.over_ms)
        return Delay(until_ms, f"late, and spread over {exact_text(self.over_ms)}", self.mark)


class Latest(Policy):
    """Runs only the latest of the late tasks with the same key: `Latest(by="customer")`.

    `by` is the name of a keyword argument or of a header, or a function of the message. A message
    that is later than `after` waits for the time `gather`, until others with its key have been
    delivered. Then all are dropped except the one that was due last. Other messages, also those
    without a key, run at once.
    """

    needs_first_due = True
    mark = "latest"

    def __init__(
        self, *, by: str | Callable[[Message], Any], after: Any = "1m", gather: Any = "5s"
    ) -> None:
        if not (callable(by) or (isinstance(by, str) and by)):
            raise PolicyError(f"Latest(by={by!r}) takes the name of an argument, or a function")
        self.by = by
        self.after_ms = length_ms("Latest(after=…)", after)
        self.gather_ms = length_ms("Latest(gather=…)", gather)

    def __repr__(self) -> str:
        by = self.by if isinstance(self.by, str) else getattr(self.by, "__name__", "…")
        return f"Latest(by={by!r}, after={exact_text(self.after_ms)!r})"

    def decide(self, message: Message) -> Decision:
        """Drop a message if a later one with its key has been seen."""
        if message.due_ms is None or (key := self._key(message)) is None:
            return RUN
        latest_ms = message.note_latest(f"{message.task} {key}", message.due_ms)
        if message.late_ms <= self.after_ms:
            return RUN
        if latest_ms > message.due_ms:
            return Drop(f"a later one with the key {key} runs instead")
        if self.mark in message.marks:
            return RUN
        until_ms = message.now_ms + self.gather_ms
        return Delay(until_ms, f"late: waits for a later one with the key {key}", self.mark)

    def _key(self, message: Message) -> Any:
        if callable(self.by):
            return self.by(message)
        return message.kwargs.get(self.by, message.headers.get(self.by))
