from __future__ import annotations

from datetime import date, datetime, timezone
from zoneinfo import ZoneInfo

import pytest

from celery_ext.policies import Window
from celery_ext.policies.policy import PolicyError, checked
from celery_ext.tasks.times import LATEST_MS


def ms(text: str, tz: str = "UTC", fold: int = 0) -> int:
    at = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(tz), fold=fold)
    return int(at.astimezone(timezone.utc).timestamp() * 1000)


MORNING = Window("05:00-07:00", "22:00-23:00", tz="Europe/Berlin", days="mon-fri")
NIGHT = Window("22:00-06:00", tz="Europe/Berlin", days="fri", except_dates=["2026-01-09"])


@pytest.mark.parametrize(
    ("window", "at", "opens"),
    [
        (MORNING, "2026-01-07T04:59:59.999", "2026-01-07T05:00"),
        (MORNING, "2026-01-07T05:00", "2026-01-07T05:00"),
        (MORNING, "2026-01-07T07:00", "2026-01-07T22:00"),
        (MORNING, "2026-01-09T23:00", "2026-01-12T05:00"),  # over a weekend
        (NIGHT, "2026-01-03T05:59", "2026-01-03T05:59"),  # of Friday
        (NIGHT, "2026-01-03T06:00", "2026-01-16T22:00"),  # the 9th is excepted
        (NIGHT, "2026-01-10T01:00", "2026-01-16T22:00"),  # so is the night that begins then
    ],
)
def test_next_opening(window: Window, at: str, opens: str) -> None:
    assert window.next_open_ms(ms(at, "Europe/Berlin")) == ms(opens, "Europe/Berlin")
    assert window.next_open_ms(ms(at, "Europe/Berlin")) == ms(opens, "Europe/Berlin")


@pytest.mark.parametrize("at_ms", [LATEST_MS, LATEST_MS + 1, LATEST_MS * 1000])
def test_times_at_the_end_of_the_calendar_stay(at_ms: int) -> None:
    assert MORNING.planned_ms(at_ms) == (at_ms, "")


@pytest.mark.parametrize(
    ("ranges", "options", "message"),
    [
        ((), {}, "without one it never opens"),
        (("5-7",), {}, "'5-7'"),
        (("24:00-25:00",), {}, "'24:00-25:00'"),
        ((5,), {}, "not 5"),
        (("05:00-07:00",), {"tz": "../etc"}, "unknown time zone"),
        (("05:00-07:00",), {"days": ""}, "which is not a day"),
        (("05:00-07:00",), {"days": "mon-payday"}, "'mon-payday'"),
        (("05:00-07:00",), {"except_dates": ["Christmas"]}, "not 'Christmas'"),
        (("05:00-07:00",), {"except_dates": [24]}, "not 24"),
        (("05:00-07:00",), {"except_dates": "2026-12-24"}, "takes a list"),
        (("05:00-07:00",), {"except_dates": None}, "takes a list"),
    ],
)
def test_what_cannot_be_meant(ranges: tuple[str, ...], options: dict, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Window(*ranges, **options)


def test_windows_that_are_never_open_together() -> None:
    early, late = Window("05:00-07:00"), Window("08:00-09:00", tz="Asia/Kolkata")
    with pytest.raises(PolicyError, match=r"queue 'q': .*never open together: leave one"):
        checked("queue 'q'", [early, late])
    assert checked("queue 'q'", [early, Window("06:00-12:00")])


def test_days_and_dates() -> None:
    assert Window("05:00-07:00", days="sat-mon, wed").days == {5, 6, 0, 2}
    same = Window("05:00-07:00", except_dates=[date(2026, 1, 1), "2026-01-02"])
    assert repr(same) == (
        "Window('05:00-07:00', tz='UTC', days='mon-sun', except_dates=['2026-01-01', '2026-01-02'])"
    )
