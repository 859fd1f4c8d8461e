"""What a killed worker costs the tasks that are not due yet."""

from __future__ import annotations

import time

from tests.benchmarks.bursts import publish
from tests.benchmarks.report import Benchmark, Figures, Row, percentile
from tests.benchmarks.rig import Rig
from tests.kit.wait import wait_until

#: A worker needs about a second for a thousand tasks.
ON_TIME_SECONDS = 2
PATIENCE_SECONDS = 10


def measure(rig: Rig) -> Figures:
    count = rig.scaled(1_000, 500)
    ahead_seconds, before_seconds = rig.scaled((15, 5), (9, 4))
    first = rig.start_worker()
    first.await_ready()
    due = time.time() + ahead_seconds
    publish(rig, count, due)
    time.sleep(max(due - before_seconds - time.time(), 0))
    first.kill()
    rig.start_worker().await_ready()
    end = due + PATIENCE_SECONDS
    seconds = end - time.time() + 1
    wait_until(lambda: rig.done() >= count or time.time() >= end, "the end", seconds)
    late = [start.at - due for start in rig.starts()]
    return {
        "ahead_s": ahead_seconds,
        "before_s": before_seconds,
        "count": count,
        "on_time": sum(each <= ON_TIME_SECONDS for each in late),
        "run": len({start.number for start in rig.starts()}),
        "max_s": percentile(late, 1) if late else 0,
    }


def rows(stock: Figures, ours: Figures) -> list[Row]:
    count = ours["count"]
    return [
        Row(
            f"{count:,.0f} tasks due in {ours['ahead_s']:.0f} s, their worker killed "
            f"{ours['before_s']:.0f} s before, another started: run within {ON_TIME_SECONDS} s "
            f"(within {PATIENCE_SECONDS} s)",
            f"all {count:,.0f}",
            f"{stock['on_time']:,.0f} ({stock['run']:,.0f})",
            f"{ours['on_time']:,.0f} ({ours['run']:,.0f})",
            reached=ours["on_time"] == ours["run"] == count,
        )
    ]


BENCHMARKS = [Benchmark("recovery", measure, rows)]
