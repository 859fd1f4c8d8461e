"""How a consumer estimates the server's time."""

from __future__ import annotations

from time import time

import pytest

from kombu_delayed.consumer.claiming.sources import ServerClock


def test_before_the_first_answer_it_is_this_machines_time() -> None:
    """A consumer may already have messages whose policies ask for the time."""
    assert ServerClock().now_ms() == pytest.approx(time() * 1000, abs=60_000)


def test_then_it_is_the_servers() -> None:
    clock = ServerClock()
    clock.compare(5_000_000)
    assert clock.now_ms() == pytest.approx(5_000_000, abs=60_000)
