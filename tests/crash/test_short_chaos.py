"""A minute of what `make chaos` does for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash import report
from tests.crash.answers import ENDS
from tests.crash.faults import KILLS
from tests.crash.run import Order, run

pytestmark = pytest.mark.crash

LEAST_KILLS = 15
LEAST_FAILOVERS = 2
LEAST_MOVES = 2


def test_nothing_is_lost_in_a_minute_of_kills(tmp_path: Path) -> None:
    result = run(Order(seconds=50, seed=7, rate=30, every_seconds=1.5, keep=tmp_path))
    kills = sum(result.faults[kind] for kind in KILLS)
    assert kills >= LEAST_KILLS
    assert result.verdict.ran > 1000
    assert result.verdict.limits.runs > 100
    assert set(result.verdict.answers.ended) == {*ENDS}
    assert result.verdict.good, report.findings(result)
    page = report.as_page([result], "make chaos")
    assert "| **over a limit**: at some instant more ran than may | 0 |" in page


def test_nothing_is_lost_in_failovers(tmp_path: Path) -> None:
    order = Order(seconds=40, seed=4, rate=30, every_seconds=1.5, keep=tmp_path, server="sentinel")
    result = run(order)
    assert result.faults["failover"] >= LEAST_FAILOVERS
    assert result.verdict.ran > 500
    assert result.verdict.good, report.findings(result)


def test_nothing_is_lost_in_a_cluster(tmp_path: Path) -> None:
    order = Order(seconds=40, seed=4, rate=30, every_seconds=1.5, keep=tmp_path, server="cluster")
    result = run(order)
    assert result.faults["failover"] >= LEAST_FAILOVERS
    assert result.faults["slot moved"] >= LEAST_MOVES
    assert result.verdict.ran > 500
    assert result.verdict.good, report.findings(result)
