"""A worker responds and is on time despite faults of its pool and its connections."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from tests.kit.disturbances import SHORT, STEPS, WORKERS, bench_of, each_pair, run

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("pool", WORKERS)
def test_a_worker_hears_after_what_is_known_to_hurt(pool: str, tmp_path: Path) -> None:
    with bench_of(pool, tmp_path) as bench:
        deque(run(bench, SHORT.get(pool, STEPS[pool])), maxlen=0)


@pytest.mark.slow
@pytest.mark.parametrize("pool", WORKERS)
def test_a_worker_hears_after_each_pair_of_disturbances(pool: str, tmp_path: Path) -> None:
    with bench_of(pool, tmp_path) as bench:
        deque(run(bench, each_pair(STEPS[pool])), maxlen=0)
