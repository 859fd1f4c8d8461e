"""How soon a worker recovers from everyday disturbances."""

from __future__ import annotations

from tests.benchmarks.report import Figures, Line, benchmark, percentile
from tests.benchmarks.rig import Rig
from tests.kit.disturbances import SHORT, STEPS, WORKERS, bench_of, each_pair, run

PING_SECONDS, LATE_SECONDS = 1.0, 0.2


def _signs(pool: str) -> Line:
    return Line(
        f"`{pool}`, after each of {{{pool} count:.0f}} disturbances: a ping is answered within; "
        "the worker has a delayed task late by (p50, longest)",
        f"{{{pool} ping p50:.3f}}, {{{pool} ping:.2f}} s; "
        f"{{{pool} late p50:.1f}}, {{{pool} late:.0f}} ms",
        f"{PING_SECONDS:g} s; {LATE_SECONDS * 1000:g} ms",
        reached=lambda f: (
            f[f"{pool} ping"] <= PING_SECONDS and f[f"{pool} late"] <= LATE_SECONDS * 1000
        ),
    )


@benchmark("liveness", *map(_signs, WORKERS), rounds=1)
def liveness(rig: Rig) -> Figures:
    """Replaced processes, closed connections and restarts of the server, each after each."""
    figures: Figures = {}
    for pool in WORKERS:
        steps = rig.scaled(each_pair(STEPS[pool]), SHORT.get(pool, STEPS[pool]))
        directory = rig.directory / pool
        directory.mkdir()
        with bench_of(pool, directory) as bench:
            signs = list(run(bench, steps))
        pings = [sign.ping_seconds for sign in signs]
        late = [sign.late_seconds * 1000 for sign in signs]
        figures |= {
            f"{pool} count": len(signs),
            f"{pool} ping p50": percentile(pings, 0.5),
            f"{pool} ping": max(pings),
            f"{pool} late p50": percentile(late, 0.5),
            f"{pool} late": max(late),
        }
    return figures
