"""Times of the day at which tasks may run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import date, datetime, timedelta, timezone
from typing import NamedTuple
from zoneinfo import ZoneInfo

from kombu_delayed.consumer.policy.decisions import Decision, Delay
from kombu_delayed.message.envelope import eta_to_ms

from ...tasks.times import EPOCH
from ..message import Message
from ..policy import RUN, Policy, PolicyError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_RANGE = re.compile(r"(\d\d?):(\d\d)-(\d\d?):(\d\d)")
_DAY_MINUTES = 24 * 60
_DAY = timedelta(days=1)

#: Later times, as of a task that is to wait for ever, stay as they are: calendars end at 9999.
LAST_MS = (datetime(9000, 1, 1, tzinfo=timezone.utc) - EPOCH) // timedelta(milliseconds=1)

#: Windows that are not open together within this time never are.
LOOK_AHEAD = timedelta(days=400)


class Range(NamedTuple):
    """Minutes since midnight; one that ends before it starts ends the next day."""

    start: int
    end: int


class Window(Policy):
    """Limits tasks to times of the day: `Window("05:00-07:00", tz="Europe/Berlin")`.

    It is open while the local time there is within one of the ranges; the end is excluded. A range
    over midnight belongs to the day on which it starts. `days` are names or ranges of names
    (`"mon-fri"`, `"mon,wed,sat-sun"`); nothing starts on `except_dates`, dates or text such as
    `"2026-12-24"`. Raises PolicyError if it could never open.
    """

    def __init__(
        self,
        *ranges: str,
        tz: str = "UTC",
        days: str = "mon-sun",
        except_dates: Iterable[date | str] = (),
    ) -> None:
        self._given = (*map(repr, ranges), f"tz={tz!r}", f"days={days!r}")
        if not ranges:
            raise PolicyError(
                'a Window takes ranges such as "05:00-07:00"; without one it never opens'
            )
        self.ranges = tuple(sorted(map(_range, ranges)))
        self.tz = _zone(tz)
        self.days = _days(days)
        self.except_dates = _dates(except_dates)
        #: A time at which it is closed, and when it opens next, in ms.
        self._closed = (0, 0)
        if self.except_dates:
            self._given += (f"except_dates={sorted(map(str, self.except_dates))}",)

    def __repr__(self) -> str:
        return f"Window({', '.join(self._given)})"

    def decide(self, message: Message) -> Decision:
        """Run if it is open, otherwise wait until it opens."""
        until_ms, reason = self.planned_ms(message.now_ms)
        return RUN if until_ms == message.now_ms else Delay(until_ms, reason)

    def planned_ms(self, at_ms: int) -> tuple[int, str]:
        """The first time from `at_ms` on at which it is open, in ms."""
        opens_ms = self.next_open_ms(at_ms)
        return opens_ms, f"waits for {self}" if opens_ms != at_ms else ""

    def next_open_ms(self, at_ms: int) -> int:
        """The first time from the given time on at which it is open; both in ms since the epoch."""
        if at_ms >= LAST_MS or self._is_open(at := EPOCH + timedelta(milliseconds=at_ms)):
            return at_ms
        closed_ms, opens_ms = self._closed
        if not closed_ms <= at_ms < opens_ms:
            opens_ms = eta_to_ms(self._next_opening(at))
            self._closed = at_ms, opens_ms
        return opens_ms

    def _is_open(self, at: datetime) -> bool:
        wall = at.astimezone(self.tz)
        today, minute = wall.date(), wall.hour * 60 + wall.minute
        for start, end in self.ranges:
            is_over_midnight = end < start
            if minute >= start and (is_over_midnight or minute < end) and self._starts_on(today):
                return True
            if is_over_midnight and minute < end and self._starts_on(today - _DAY):
                return True
        return False

    def _starts_on(self, day: date) -> bool:
        return day.weekday() in self.days and day not in self.except_dates

    def _next_opening(self, at: datetime) -> datetime:
        first = at.astimezone(self.tz).date() - 2 * _DAY
        for n in range(7 * (len(self.except_dates) + 5)):
            # A clock that is set back over midnight repeats a day when the next one has begun.
            days = (first + m * _DAY for m in range(n, n + 3))
            found = [start for day in days for start, _ in self._openings(day) if start > at]
            if found:
                return min(found)
        raise PolicyError(f"{self} does not open any more after {at.isoformat()}")

    def _openings(self, day: date) -> Iterator[tuple[datetime, datetime]]:
        """Yield the openings that begin on a day of the local calendar, in UTC."""
        if not self._starts_on(day):
            return
        midnight = datetime(day.year, day.month, day.day)
        for start, end in self.ranges:
            length = (end - start) % _DAY_MINUTES or _DAY_MINUTES
            opens = midnight + timedelta(minutes=start)
            yield from self._on_the_wall(opens, opens + timedelta(minutes=length))

    def _on_the_wall(self, start: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
        """Yield when local clocks show `start` to `end`: longer or shorter if they change then."""
        low = (start - _DAY).replace(tzinfo=timezone.utc)
        high = (end + _DAY).replace(tzinfo=timezone.utc)
        for since, until, offset in _offsets(self.tz, low, high):
            opens = max((start - offset).replace(tzinfo=timezone.utc), since)
            closes = min((end - offset).replace(tzinfo=timezone.utc), until)
            if opens < closes:
                yield opens, closes

    def check(self, others: tuple[Policy, ...]) -> None:
        """Raises PolicyError if it is never open together with another one."""
        for other in others:
            if isinstance(other, Window) and other is not self:
                self._meet(other)

    def _meet(self, other: Window) -> None:
        at_ms = eta_to_ms(datetime.now(timezone.utc))
        end_ms = at_ms + LOOK_AHEAD // timedelta(milliseconds=1)
        while at_ms < end_ms:
            opens_ms = other.next_open_ms(self.next_open_ms(at_ms))
            if opens_ms == at_ms:
                return
            at_ms = opens_ms
        raise PolicyError(f"{self} and {other} are never open together: leave one of them out")


def _offsets(
    tz: ZoneInfo, low: datetime, high: datetime
) -> Iterator[tuple[datetime, datetime, timedelta]]:
    """Yield the spans of a few days in which the clocks of a zone do not change, and the offset."""
    while low < high:
        offset, until = _offset(tz, low), high
        if _offset(tz, high) != offset:
            until = _change(tz, low, high)
        yield low, until, offset
        low = until


def _offset(tz: ZoneInfo, at: datetime) -> timedelta:
    return at.astimezone(tz).utcoffset() or timedelta()


def _change(tz: ZoneInfo, low: datetime, high: datetime) -> datetime:
    """Return the second at which the offset changes between two times."""
    offset, second = _offset(tz, low), timedelta(seconds=1)
    while high - low > second:
        middle = low + (high - low) // (2 * second) * second
        low, high = (middle, high) if _offset(tz, middle) == offset else (low, middle)
    return high


def _range(text: str) -> Range:
    found = _RANGE.fullmatch(text) if isinstance(text, str) else None
    hours = [int(part) for part in found.groups()] if found else [99, 99, 99, 99]
    start, end = hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
    if start >= _DAY_MINUTES or end > _DAY_MINUTES or max(hours[1], hours[3]) > 59:
        raise PolicyError(f'a Window takes ranges such as "05:00-07:00", not {text!r}')
    if start == end:
        raise PolicyError(f'the Window range {text!r} is never open; a whole day is "00:00-24:00"')
    return Range(start, end)


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except Exception as error:  # a wrong type, a name that is a path, or unknown
        raise PolicyError(
            f"Window(tz={name!r}): unknown time zone; give a name such as Europe/Berlin, and on "
            "systems without a time zone database install the package tzdata"
        ) from error


def _days(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in str(text).lower().replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if first not in DAYS or (last or first) not in DAYS:
            raise PolicyError(
                f"Window(days={text!r}) has {part!r}, which is not a day: give days such as "
                '"mon-fri" or "mon,wed,sat-sun"'
            )
        start, end = DAYS.index(first), DAYS.index(last or first)
        found |= {(start + n) % 7 for n in range((end - start) % 7 + 1)}
    return frozenset(found)


def _dates(given: Iterable[date | str]) -> frozenset[date]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise PolicyError(
            f'Window(except_dates=…) takes a list such as ["2026-12-24"], not {given!r}'
        )
    found = set()
    for each in given:
        try:
            found.add(
                date.fromisoformat(each)
                if isinstance(each, str)
                else date(each.year, each.month, each.day)
            )
        except (ValueError, AttributeError) as error:
            raise PolicyError(
                f'Window(except_dates=…) takes dates such as "2026-12-24", not {each!r}'
            ) from error
    return frozenset(found)
