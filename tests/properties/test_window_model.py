"""Windows against a model that looks at a clock on the wall minute by minute."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

from hypothesis import given, settings
from hypothesis import strategies as st

from celery_ext.policies import Window
from celery_ext.policies.times.window import DAYS

_NAMES = """
    UTC Europe/Berlin Europe/London Europe/Dublin Europe/Moscow Europe/Istanbul America/New_York
    America/St_Johns America/Sao_Paulo America/Havana America/Caracas America/Phoenix
    America/Santiago America/Nuuk America/Los_Angeles Asia/Kolkata Asia/Kathmandu Asia/Tehran
    Asia/Gaza Asia/Beirut Asia/Amman Asia/Tokyo Asia/Pyongyang Africa/Casablanca Africa/Cairo
    Africa/Windhoek Australia/Lord_Howe Australia/Adelaide Pacific/Apia Pacific/Chatham
"""
ZONES = _NAMES.split()
FIRST = datetime(2006, 1, 1, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
ON_DAY = 24 * 60


def minutes() -> st.SearchStrategy[int]:
    # Near the times when clocks are put forward.
    return st.one_of(st.integers(0, ON_DAY - 1), st.integers(0, 4 * 60), st.just(23 * 60 + 30))


ranges = st.lists(
    st.tuples(minutes(), minutes()).filter(lambda r: r[0] != r[1]), min_size=1, max_size=3
)
days = st.sets(st.sampled_from(range(7)), min_size=1)


def text(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


class Model:
    """Decides by the clock on the wall whether a window is open in this minute."""

    def __init__(self, spans: list[tuple[int, int]], tz: str, days: set[int], without: set[date]):
        self.spans, self.tz, self.days, self.without = spans, ZoneInfo(tz), days, without

    def is_open(self, at: datetime) -> bool:
        wall = at.astimezone(self.tz)
        minute = wall.hour * 60 + wall.minute
        return any(
            (start <= minute < end and self.starts(wall.date()))
            or (end < start <= minute and self.starts(wall.date()))
            or (minute < end < start and self.starts(wall.date() - timedelta(days=1)))
            for start, end in self.spans
        )

    def starts(self, day: date) -> bool:
        return day.weekday() in self.days and day not in self.without

    def next_open(self, at: datetime) -> datetime:
        if self.is_open(at):
            return at
        at = at.replace(second=0, microsecond=0)
        while not self.is_open(at):
            at += MINUTE
        return at


def changes(tz: str, year: int) -> list[datetime]:
    """The days of a year on which the clocks of a zone are put forward."""
    zone, day = ZoneInfo(tz), timedelta(days=1)
    start = datetime(year, 1, 1, tzinfo=timezone.utc)
    each = [start + n * day for n in range(366)]
    return [
        at
        for at in each
        if at.astimezone(zone).utcoffset() != (at + day).astimezone(zone).utcoffset()
    ]


@st.composite
def moments(draw: st.DrawFn, tz: str) -> datetime:
    near = changes(tz, draw(st.integers(2006, 2025)))
    if near and draw(st.booleans()):
        start = draw(st.sampled_from(near)) - timedelta(days=1)
        return start + timedelta(seconds=draw(st.integers(0, 3 * 86_400)))
    return FIRST + timedelta(seconds=draw(st.integers(0, 20 * 366 * 86_400)))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(ZONES), ranges, days, st.booleans())
def test_a_window_opens_when_the_model_does(
    data: st.DataObject, tz: str, spans: list[tuple[int, int]], days: set[int], excepts: bool
) -> None:
    at = data.draw(moments(tz))
    without = {at.date(), at.date() + timedelta(days=2)} if excepts else set()
    window = Window(
        *(f"{text(start)}-{text(end)}" for start, end in spans),
        tz=tz,
        days=",".join(DAYS[n] for n in days),
        except_dates=without,
    )
    expected = Model(spans, tz, days, without).next_open(at)
    found = window.next_open_ms(round(at.timestamp() * 1000))
    assert found == round(expected.timestamp() * 1000), datetime.fromtimestamp(
        found / 1000, timezone.utc
    )
