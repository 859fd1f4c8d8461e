"""How fast one process sends delayed tasks."""

from __future__ import annotations

from time import perf_counter

from tests.benchmarks.app import batch, create_app
from tests.benchmarks.report import Benchmark, Figures, at_least
from tests.benchmarks.rig import Rig

COUNTDOWN_SECONDS = 3600
WARM_UP = 200


def singly(url: str, count: int) -> float:
    """Tasks per second, one call of `apply_async` each."""
    work = create_app(url).tasks["work"]
    for _ in range(WARM_UP):
        work.apply_async(countdown=COUNTDOWN_SECONDS)
    began = perf_counter()
    for _ in range(count):
        work.apply_async(countdown=COUNTDOWN_SECONDS)
    return count / (perf_counter() - began)


def in_batch(url: str, count: int) -> float:
    """Tasks per second, in one `Producer.batch()`."""
    app = create_app(url)
    work = app.tasks["work"]
    work.apply_async(countdown=COUNTDOWN_SECONDS)
    began = perf_counter()
    with batch(app) as options:
        for _ in range(count):
            work.apply_async(countdown=COUNTDOWN_SECONDS, **options)
    return count / (perf_counter() - began)


def measure_singly(rig: Rig) -> Figures:
    return {"rate": rig.apart(singly, rig.url(), rig.scaled(8_000, 1_500))}


def measure_batch(rig: Rig) -> Figures:
    return {"rate": rig.apart(in_batch, rig.url(), rig.scaled(20_000, 4_000))}


BENCHMARKS = [
    Benchmark(
        "publish",
        measure_singly,
        at_least("`apply_async(countdown=…)` from one process", "rate", 1.4),
    ),
    Benchmark(
        "publish-batch",
        measure_batch,
        at_least("the same within `Producer.batch()`", "rate", 1.0),
    ),
]
