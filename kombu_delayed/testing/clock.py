"""A clock that tests move, so that a task that is due in days runs now.

Neither the machine's clock nor Python's is touched. Moving the clock ahead makes all due times
earlier instead, in one script for each queue, and so are the next tokens of rates and the ends of
pauses. A message that is due then is claimed at once by a process that consumes. A message that is
sent later has its whole delay ahead, since its sender's clock has not moved. So producers, workers
and leases need not know that the clock was moved. Only policies do, which depend on the time of day
and on how late a message is: the policies of this process see the time that the clock shows
(`kombu_delayed.message.clock`).
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import cache
from importlib.resources import files

from ..message import clock
from ..message.envelope import EPOCH, eta_to_ms
from ..store.calls.scripts import Script
from .broker import Broker


@cache
def _shift() -> Script:
    source = files(__package__).joinpath("shift.lua").read_text(encoding="utf-8")
    return Script("shift", source)


class Clock:
    """The clock that decides when messages of the test's broker are due."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._offset_ms = clock.ahead_ms = 0

    @property
    def offset(self) -> timedelta:
        """How far the clock is ahead of the machine's."""
        return timedelta(milliseconds=self._offset_ms)

    def now(self) -> datetime:
        """The time that it shows, in UTC."""
        return EPOCH + timedelta(milliseconds=self.broker.store().now_ms() + self._offset_ms)

    def advance(self, by: timedelta | None = None, **parts: float) -> int:
        """Move the clock forward by a timedelta, or by its arguments: `advance(days=3)`.

        Returns how many messages became due; only these run. Raises ValueError for a negative time.
        """
        total = (by or timedelta()) + timedelta(**parts)
        by_ms = round(total / timedelta(milliseconds=1))
        if by_ms < 0:
            raise ValueError(f"time moves forward, not by {total}; reset() goes back to real time")
        # A message sent in this millisecond is rounded up to the next one: wait for that.
        now_ms = self.broker.store().now_ms
        began_ms = now_ms()
        while now_ms() <= began_ms:
            pass
        return self._move(by_ms)

    def set(self, moment: datetime | str) -> int:
        """Move the clock forward to a time: a datetime or ISO 8601 (UTC without a zone).

        Returns the number of messages that became due. Raises ValueError for a time in the past.
        """
        by_ms = eta_to_ms(moment) - self.broker.store().now_ms() - self._offset_ms
        if by_ms < 0:
            raise ValueError(
                f"time moves forward, not to {moment}: it is {self.now()}. reset() goes back to "
                "real time"
            )
        return self._move(by_ms)

    def reset(self) -> None:
        """Return to real time. Waiting messages get back the time by which they were moved."""
        self._move(-self._offset_ms)

    def wait_until_done(self, timeout_seconds: float = 10) -> None:
        """Wait until nothing is due, ready, unacked or running: `Broker.wait_until_done`."""
        self.broker.wait_until_done(timeout_seconds)

    def _move(self, by_ms: int) -> int:
        self._offset_ms += by_ms
        # First: a policy that is asked too early is asked again, but one asked too late is not.
        clock.ahead_ms = self._offset_ms
        return sum(self._shift(*names, by_ms) for names in self.broker.backlogs())

    def _shift(self, prefix: str, queue: str, by_ms: int) -> int:
        store = self.broker.store(prefix)
        keys = store.keys(queue)
        given = _shift().keys_among(keys) | {"now": "", "by_ms": -by_ms, "steps": keys.steps}
        given["partition_size"] = store.partition_size
        fell_due: int = _shift()(store.run, **given)
        return fell_due
