"""Lengths of time, rates and sizes as they are written."""

from __future__ import annotations

import pytest

from kombu_delayed.message.durations import read_rate, read_size, read_span


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("+2h", 7_200),
        ("1h30m", 5_400),
        ("-15M", -900),
        ("0.5d", 43_200),
        (" 1w", 604_800),
    ],
)
def test_spans(text: str, seconds: float) -> None:
    span = read_span(text)
    assert span is not None
    assert span.total_seconds() == seconds


@pytest.mark.parametrize(
    ("text", "per_second"),
    [("500/s", 500), ("500", 500), ("30k/m", 500), ("2.5M/d", 28.935), ("1,000/h", 0.2778)],
)
def test_rates(text: str, per_second: float) -> None:
    assert read_rate(text) == pytest.approx(per_second, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("300", 300), ("300 B", 300), ("2kB", 2_000), ("2 KiB", 2_048), ("1.5GiB", 1.5 * 2**30)],
)
def test_sizes(text: str, size_bytes: float) -> None:
    assert read_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "x", "5x", "/s", "-5", "1e9", "5/y", "5 5", "iB", "5i"])
def test_what_is_none_of_them(text: str) -> None:
    assert (read_span(text), read_rate(text), read_size(text)) == (None, None, None)
