"""Lengths of time, rates and sizes: one grammar for all callers."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import click
import pytest
from pydantic import ValidationError

from celery_ext.cli.times import SPAN
from celery_ext.errors import QueryError
from celery_ext.http.api.fields import span_of
from celery_ext.http.api.task_models import NewTask
from celery_ext.policies import Limit, PolicyError, Timeout
from celery_ext.policies.written import restored, written
from celery_ext.tasks.times import length_ms
from kombu_delayed.message.durations import (
    exact_text,
    length_text,
    parse_length,
    parse_ms,
    parse_rate,
    parse_size,
)
from kombu_delayed.sizing.__main__ import main as sizing

LENGTHS: list[tuple[str, float]] = [
    ("90", 90),
    ("100ms", 0.1),
    ("1m500ms", 60.5),
    ("+2h", 7_200),
    ("1h 30m", 5_400),
    ("30m1H", 5_400),
    ("0.5d", 43_200),
    (" 1w ", 604_800),
]

NO_LENGTHS = ["", "soon", "h", "1y", "--1h", "1h-30m", "1e9", "5/s", "PT1H", "9" * 400 + "w"]

RATES: list[tuple[str, float]] = [
    ("500", 500),
    ("30k/m", 500),
    ("2.5M/d", 2.5e6 / 86_400),
    ("1,000/h", 1_000 / 3_600),
    ("5/1.5m", 5 / 90),
    ("2/100ms", 20),
    (" 7/w ", 7 / 604_800),
]

NO_RATES = ["", "often", "0/s", "5/0s", "/s", "5/", "5/2", "5/y", "-5/s", "5/-2h", "5/999w"]


def by_sizing(option: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        given = {"rate": "1/s", "delay": "1s", "payload": "1", option: text}
        arguments = [part for name, each in given.items() for part in (f"--{name}", each)]
        return sizing.make_context("sizing", arguments).params[option]

    return parse


def by_http(text: str) -> float:
    at = NewTask(task="t", delay=text).due_at
    assert at is not None
    assert abs((at - datetime.now(timezone.utc) - span_of(text)).total_seconds()) < 60
    return span_of(text).total_seconds()


#: The callers that take a length of time, and the error of each.
LENGTH_TAKERS = {
    "policy": (lambda text: Timeout(text).after_ms / 1000, PolicyError),
    "cli": (lambda text: SPAN.convert(text, None, None).total_seconds(), click.BadParameter),
    "http": (by_http, ValidationError),
    "sizing": (by_sizing("delay"), click.BadParameter),
    "expect": (lambda text: length_ms("timeout", text) / 1000, QueryError),
}

RATE_TAKERS = {
    "policy": (lambda text: 1000 / Limit(rate=text).every_ms, PolicyError),
    "sizing": (by_sizing("rate"), click.BadParameter),
}


@pytest.mark.parametrize("taker", LENGTH_TAKERS)
def test_everybody_takes_the_same_lengths(taker: str) -> None:
    take, error = LENGTH_TAKERS[taker]
    assert [take(text) for text, _ in LENGTHS] == [seconds for _, seconds in LENGTHS]
    check_refusals(take, NO_LENGTHS, error)


def check_refusals(take: Callable[[str], Any], texts: list[str], error: type[Exception]) -> None:
    for text in texts:
        with pytest.raises(error, match="such as") as raised:
            take(text)
        assert repr(text)[:20] in str(raised.value)


@pytest.mark.parametrize("taker", RATE_TAKERS)
def test_everybody_takes_the_same_rates(taker: str) -> None:
    take, error = RATE_TAKERS[taker]
    assert [take(text) for text, _ in RATES] == pytest.approx([rate for _, rate in RATES])
    check_refusals(take, NO_RATES, error)


@pytest.mark.parametrize(
    ("given", "seconds"), [(0.5, 0.5), (-3, -3), (timedelta(hours=1), 3_600), ("-1.5H", -5_400)]
)
def test_lengths_that_are_no_text_or_go_back(given: Any, seconds: float) -> None:
    assert parse_length(given).total_seconds() == seconds


@pytest.mark.parametrize("given", [None, True, b"1h", [], math.nan, math.inf, 10**400, 1e300])
def test_other_things_are_no_lengths(given: Any) -> None:
    with pytest.raises(ValueError, match="such as") as raised:
        parse_length(given)
    assert repr(given)[:20] in str(raised.value)


def test_a_length_out_of_bounds_says_which() -> None:
    with pytest.raises(ValueError, match=r"^0 is not a length of time from 1ms to 3660d: give"):
        parse_ms(0)
    assert (parse_ms(0.001), parse_ms("3660d")) == (1, 3_660 * 86_400_000)


@pytest.mark.parametrize("given", ["9" * 20 + "w", math.inf, timedelta.max])
def test_too_long_a_length_says_so(given: Any) -> None:
    with pytest.raises(ValueError, match="to 999999999d: give"):
        parse_length(given)


@pytest.mark.parametrize(
    ("given", "text"),
    [("500", "500/s"), ("100/m", "100/m"), ("30k/m", "30000/m"), ("1000/2h", "1000/2h")],
)
def test_how_rates_show(given: str, text: str) -> None:
    assert str(parse_rate(given)) == Limit(rate=given).rate == text
    assert repr(given) in repr(Limit(rate=given))  # other versions find a queue's limits by this


@pytest.mark.parametrize("given", ["0.00001/s", "3/d", "1234567.5/s", "1000000000M/s"])
def test_a_rate_that_a_worker_has_declared_can_be_read(given: str) -> None:
    declared = written(Limit(rate=given))
    assert written(restored(declared)) == declared
    assert parse_rate(str(parse_rate(given))) == parse_rate(given)


@pytest.mark.parametrize("given", ["1e-9/s", "1e-300/s"])
def test_a_rate_has_a_least_one(given: str) -> None:
    """The server keeps the time of the next token, which has a bound."""
    assert parse_rate("1/3660d").every_ms == 3_660 * 86_400_000
    with pytest.raises(ValueError, match="is not a rate of at least one in 3660d: give"):
        parse_rate(given)


def test_the_time_between_two_is_exact() -> None:
    assert (parse_rate("100/m").every_ms, parse_rate("1000/2h").every_ms) == (600.0, 7_200.0)
    assert parse_rate("3/s").every_ms == 1000 / 3  # other versions find a limit by this number


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0123, "12ms"),
        (-0.5, "-500ms"),
        (59.99, "59.9s"),
        (3_599.9, "59m 59s"),
        (100_000, "1d 3h"),
    ],
)
def test_lengths_for_people(seconds: float, text: str) -> None:
    assert length_text(seconds) == text
    assert abs(parse_length(text).total_seconds() - seconds) <= max(abs(seconds) / 20, 0.001)


@pytest.mark.parametrize(("ms", "text"), [(1, "0.001s"), (90_061_500, "1d1h1m1.5s")])
def test_exact_lengths(ms: int, text: str) -> None:
    assert exact_text(ms) == text
    assert parse_ms(text) == ms


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("300", 300), ("300 B", 300), ("2kB", 2_000), ("2 KiB", 2_048), ("1.5GiB", 1.5 * 2**30)],
)
def test_sizes(text: str, size_bytes: float) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "x", "5x", "-5", "1e9", "5 5", "iB", "5i"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: give"):
        parse_size(text)
