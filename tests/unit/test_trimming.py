from __future__ import annotations

import pytest

from kombu_delayed.store import caller
from kombu_delayed.store.caller import TRIM_CALLS, TRIM_SECONDS, TRIM_STREAMS, Trimming


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    times = [1000.0]
    monkeypatch.setattr(caller, "monotonic", lambda: times[-1])
    return times


def test_one_call_in_many_looks_after_a_stream(clock: list[float]) -> None:
    known = Trimming()
    bounds = [known.bound("a", 7) for _ in range(2 * TRIM_CALLS + 1)]
    assert [n for n, bound in enumerate(bounds) if bound == 7] == [0, TRIM_CALLS, 2 * TRIM_CALLS]
    assert set(bounds) == {7, -7}


def test_each_stream_is_looked_after(clock: list[float]) -> None:
    known = Trimming()
    assert [known.bound(each, 7) for each in "abab"] == [7, 7, -7, -7]


def test_the_first_call_after_a_while_looks_after_it(clock: list[float]) -> None:
    known = Trimming()
    assert [known.bound("a", 7), known.bound("a", 7)] == [7, -7]
    clock.append(clock[-1] + TRIM_SECONDS)
    assert [known.bound("a", 7), known.bound("a", 7)] == [7, -7]


def test_streams_that_are_remembered_are_bounded(clock: list[float]) -> None:
    known = Trimming()
    for n in range(2 * TRIM_STREAMS + 1):
        known.bound(f"{n}", 7)
    assert len(known._rests) <= TRIM_STREAMS
    assert known.bound(f"{2 * TRIM_STREAMS}", 7) == -7
