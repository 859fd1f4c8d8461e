"""What a delayed message costs in the server's memory, beyond itself."""

from __future__ import annotations

from tests.benchmarks.app import QUEUE
from tests.benchmarks.fill import fill, sample, store_of
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig

LIMIT_BYTES = 165


def measure(rig: Rig) -> Figures:
    count = rig.scaled(1_000_000, 50_000)
    template = sample(rig)
    before = rig.redis.info("memory")["used_memory"]
    fill(store_of(rig), QUEUE, count, template)
    growth = rig.redis.info("memory")["used_memory"] - before
    record_bytes = 1 + len(template[1])
    return {"bytes": growth / count - record_bytes, "record_bytes": record_bytes, "count": count}


def rows(ours: Figures) -> list[Row]:
    return [
        Row(
            f"server memory for each of {ours['count']:,.0f} delayed messages, beyond its own "
            f"{ours['record_bytes']:.0f} B",
            f"≤ {LIMIT_BYTES} B",
            NOTHING,
            f"{ours['bytes']:.0f} B",
            reached=ours["bytes"] <= LIMIT_BYTES,
        )
    ]


BENCHMARKS = [Benchmark("bookkeeping", measure, rows, sides=("ours",), rounds=1)]
