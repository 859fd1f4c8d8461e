"""Two minutes of what `make chaos` does for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash import report
from tests.crash.answers import ENDS
from tests.crash.page import as_page
from tests.crash.run import Order, Result, run
from tests.crash.schedule import CLOCKS, shares
from tests.kit.clock_steps import LIBRARY

pytestmark = [pytest.mark.crash, pytest.mark.slow]


def check(result: Result) -> None:
    kinds = {*shares(result.order.server)} - (set() if LIBRARY else CLOCKS)
    missing = {kind for kind in kinds if not result.faults[kind]}
    assert not missing, f"did not strike: {missing}"
    assert result.verdict.ran > 500
    assert result.verdict.calm_late_ms
    assert result.verdict.pings.sent  # a run this short may have no calm that is long enough
    assert result.verdict.good, report.findings(result)


def test_nothing_is_lost_on_a_single_server(tmp_path: Path) -> None:
    result = run(Order(seconds=42, seed=7, rate=25, every_seconds=1.5, keep=tmp_path / "run"))
    check(result)
    assert result.verdict.limits.runs > 100
    assert result.verdict.records.runs > 500
    assert result.verdict.records.steps > 1_000
    assert set(result.verdict.answers.ended) == {*ENDS}
    page = as_page([[result]], "make chaos")
    assert "| **over a limit**: more tasks were running than allowed | 0 |" in page


def test_nothing_is_lost_in_failovers(tmp_path: Path) -> None:
    kept = tmp_path / "run"
    check(run(Order(38, seed=4, rate=25, every_seconds=1.5, keep=kept, server="sentinel")))


def test_nothing_is_lost_in_a_cluster(tmp_path: Path) -> None:
    kept = tmp_path / "run"
    order = Order(40, 4, rate=25, every_seconds=1.5, keep=kept, server="cluster", reshard=2_000)
    result = run(order)
    check(result)
    assert result.stalls_ms
    assert not result.given_up
