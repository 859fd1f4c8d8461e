"""The load of a simulation: what falls due, in which windows, and its course over time."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from celery_ext.spark.simulation import load as simulate_load
from celery_ext.spark.simulation.load import (
    GROUPS,
    Slice,
    arriving,
    run,
    sample,
    slices_of,
    waits,
    windows_of,
)
from celery_ext.spark.simulation.model import SPREADS, Arrivals, Fleet, Spread
from celery_ext.spark.simulation.queue import Tally
from celery_ext.spark.simulation.result import mark
from celery_ext.spark.simulation.timeline import busiest_rate, timeline
from kombu_delayed import sizing
from kombu_delayed.errors import OptionError
from tests.kit.workers import ROOT

WRONG: list[tuple[type, dict[str, Any], str]] = [
    (Fleet, {"workers": 0}, "workers is a whole number from 1 to 1,000,000, not 0"),
    (Fleet, {"run_seconds": 0}, "run_seconds is above 0, not 0"),
    (Fleet, {"run_spread": "normal"}, "constant, exponential, lognormal, not 'normal'"),
    (Fleet, {"run_p95_seconds": 2}, "run_p95_seconds is for run_spread lognormal"),
    (Fleet, {"run_spread": "lognormal"}, "lognormal needs run_p95_seconds"),
    (Fleet, {"run_spread": "lognormal", "run_p95_seconds": 4.0}, "from 1 to 3.87 times their mean"),
    (Fleet, {"crashes_per_day": 9000}, "gets no work done"),
    (Arrivals, {"peak": 2.5}, "peak is a number from 1 to 2, not 2.5"),
    (Arrivals, {"delay_p95_seconds": 9.0}, "delay_p95_seconds needs delay_seconds"),
]


@pytest.mark.parametrize(("given", "values", "text"), WRONG)
def test_wrong_parameters(given: type, values: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        given(**values)


@pytest.mark.parametrize(
    "spread",
    [
        Spread("constant", 3.0),
        Spread("exponential", 3.0),
        Spread("lognormal", 3.0, 9.0),
        Spread("lognormal", 3.0, 3.0),
    ],
)
def test_spreads(spread: Spread) -> None:
    draw = spread.sampler(random.Random(1))
    found = sorted(draw() for _ in range(100_000))
    mean = sum(found) / len(found)
    variance = sum((each - mean) ** 2 for each in found) / len(found)
    assert mean == pytest.approx(3.0, rel=0.02)
    assert variance / mean**2 == pytest.approx(spread.variation, rel=0.1, abs=1e-9)
    for seconds in (0.0, 1.0, 4.0):
        beyond = sum(max(each - seconds, 0.0) for each in found) / len(found)
        assert spread.beyond(seconds) == pytest.approx(beyond, abs=0.04)
    if spread.p95:
        assert found[95_000] == pytest.approx(spread.p95, rel=0.03)


def total(slices: Sequence[Slice]) -> int:
    return sum(part.messages for part in slices)


def arrived(**given: Any) -> list[Slice]:
    return slices_of(arriving(Arrivals(**given), Fleet()))


def test_arrivals_of_a_day() -> None:
    slices = arrived(messages=1_000_000, peak=1.5)
    assert total(slices) == pytest.approx(1_000_000, rel=0.005)
    noon = total([part for part in slices if 42_000 <= part.at < 44_400])
    midnight = total([part for part in slices if part.at < 1200 or part.at >= 85_200])
    assert noon / midnight == pytest.approx(3, rel=0.03)
    assert [part.number for part in slices] == [*range(len(slices))]


CONSTANT = {"run_spread": "constant", "run_seconds": 1 - sizing.TASK_SECONDS}


def test_waits() -> None:
    """Ten slots run ten messages a second."""
    slices = slices_of([(0, 1, 15), (1, 2, 20), (2, 2, 10), (5, 6, 3)])
    found = waits(slices, Fleet(workers=5, slots=2, **CONSTANT))
    assert found == pytest.approx([0, 0.5, 1.5, 0, 0])


def test_a_small_sample() -> None:
    """It has both short and long waits, and enough of them to estimate its error."""
    fleet = Fleet(**CONSTANT)
    slices = slices_of([(n, n + 1, 20_000) for n in range(300)])
    windows = windows_of(slices, waits(slices, fleet), fleet)
    assert len(windows) == 300
    for most in (1, 20_000, 100_000):
        found = sample(windows, most, fleet)
        assert {each.group for each in found} == {*range(GROUPS + 1)}
        mean = sum(each.wait_seconds for each in found if each.group) / (len(found) - 1)
        assert mean == pytest.approx(windows[150].wait_seconds, rel=0.15)
    assert sample(windows[:5], 1, fleet) == windows[:5]


def merged(tallies: Sequence[Tally]) -> dict[int, int]:
    rows = zip(*(tally.classes for tally in tallies), strict=True)
    return {number: sum(row) for number, row in enumerate(rows) if any(row)}


LOADS = [
    (Fleet(workers=5, slots=2, run_seconds=0.93), {}),
    (Fleet(workers=5, slots=2, run_seconds=0.9), {"peak": 1.6}),
    (Fleet(workers=50, slots=2, run_seconds=0.9), {"on_the_hour": 0.9}),
    (Fleet(workers=20, slots=2, run_seconds=1.0, crashes_per_day=300, acks_late=True), {}),
]


@pytest.mark.parametrize(
    ("fleet", "given"), LOADS, ids=["heavy", "too much at noon", "at full hours", "with deaths"]
)
def test_windows_are_as_one(
    fleet: Fleet, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Independent windows give the same result as one run through all messages."""
    monkeypatch.setattr(simulate_load, "MOST_IN_SLICE", 3_000)
    slices = slices_of(arriving(Arrivals(messages=72_000, hours=2, **given), fleet))
    wait = waits(slices, fleet)
    monkeypatch.setattr(simulate_load, "LEAST_IN_WINDOW", 10**9)
    (whole,) = windows_of(slices, wait, fleet)
    monkeypatch.setattr(simulate_load, "LEAST_IN_WINDOW", 5_000)
    windows = windows_of(slices, wait, fleet)
    assert len(windows) > 9
    assert sum(window.messages for window in windows) == whole.messages
    one, many = [run(whole, fleet)], [run(window, fleet) for window in windows]
    for share in (0.5, 0.95, 0.99):
        expected = mark(merged(one), share)
        assert mark(merged(many), share) == pytest.approx(expected, rel=0.25, abs=0.02)
    for name in ("busy_seconds", "redelivered"):
        found = sum(getattr(tally, name) for tally in many)
        assert found == pytest.approx(getattr(one[0], name), rel=0.1)


@pytest.mark.parametrize(
    ("hours", "spread", "delay"),
    [
        *((24.0, "exponential", delay) for delay in (60.0, 7200.0, 500_000.0)),
        (24.0, "constant", 100_000.0),
        (0.1, "constant", 1_000.0),
        *((0.01, spread, 31_000_000.0) for spread in SPREADS),
        (24.0, "lognormal", 7200.0),
    ],
)
def test_the_course_of_a_steady_load(hours: float, spread: str, delay: float) -> None:
    """Little's law: the delayed count is the rate times the mean delay, however short the load."""
    percentile = 3 * delay if spread == "lognormal" else None
    given = Arrivals(
        messages=400_000,
        hours=hours,
        delay_seconds=delay,
        delay_spread=spread,
        delay_p95_seconds=percentile,
    )
    fleet = Fleet(workers=100)
    slices = slices_of(arriving(given, fleet))
    points = timeline(slices, waits(slices, fleet), fleet, given)
    mean = sum(point.delayed for point in points) / len(points)
    assert mean == pytest.approx(400_000 / given.seconds * delay, rel=0.02)


@pytest.mark.parametrize("hours", [1, 24, 240])
def test_the_busiest_minute_is_a_minute(hours: int) -> None:
    """However long the whole is: here on each full hour, and evenly besides."""
    fleet, rate = Fleet(workers=1_000, slots=8, run_seconds=1), 100
    given = Arrivals(messages=rate * 3_600 * hours, hours=hours, on_the_hour=0.5)
    slices = slices_of(arriving(given, fleet))
    expected = (0.5 * rate * 3_600 + 0.5 * rate * 60) / 60
    assert busiest_rate(slices, waits(slices, fleet), fleet) == pytest.approx(expected, rel=0.05)


def test_the_guide_says_how_much_memory_messages_take() -> None:
    guide = (ROOT / "docs" / "guides" / "simulate.md").read_text(encoding="utf-8")
    found = re.findall(r"most in Redis +([\d,]+) messages, ([\d,.]+) GiB", guide)
    assert found
    for count, gib in found:
        memory = sizing.memory_bytes(int(count.replace(",", "")), sizing.RECORD_BYTES)
        assert f"{memory / 2**30:,.1f}" == gib
    assert f"{sizing.message_bytes(sizing.RECORD_BYTES):.0f} bytes by default" in guide
