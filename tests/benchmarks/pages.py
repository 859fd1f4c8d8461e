"""How soon the pages and a look at one task are there, beside a large backlog."""

from __future__ import annotations

import time
from time import perf_counter

from tests.benchmarks.fill import fill, sample, store_of
from tests.benchmarks.http import Connection, look_up, serve
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig

#: What is read for all visitors is kept for less than this, or 20 times what reading takes.
APART_SECONDS = 3.0


def open_pages(port: int, path: str, count: int) -> float:
    """The time of the slowest of some visits, in ms, each of which reads anew."""
    took = []
    for _ in range(count):
        connection, began = Connection(port), perf_counter()
        connection.ask(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        took.append(perf_counter() - began)
        connection.close()
        time.sleep(max(APART_SECONDS, 21 * took[-1]))
    return 1000 * max(took)


def measure(rig: Rig) -> Figures:
    count = rig.scaled(1_000_000, 50_000)
    fill(store_of(rig), "celery", count, sample(rig))
    port, visits = serve(rig), rig.scaled(6, 2)
    return {
        "count": float(count),
        "overview_ms": rig.apart(open_pages, port, "/?ahead=month", visits, seconds=300),
        "backlog_ms": rig.apart(open_pages, port, "/backlog", visits, seconds=300),
        "p99_ms": rig.apart(look_up, port, rig.scaled(2_000, 500)),
    }


def rows(ours: Figures) -> list[Row]:
    where = f"with {ours['count']:,.0f} delayed"
    limits = (
        ("the slowest of some visits to the overview", "overview_ms", 200),
        ("the same of the backlog's first page", "backlog_ms", 200),
        ("p99 of `GET /v1/tasks/{id}`", "p99_ms", 10),
    )
    return [
        Row(
            f"{what}, {where}",
            f"≤ {limit} ms",
            NOTHING,
            f"{ours[name]:.1f} ms",
            NOTHING,
            ours[name] <= limit,
        )
        for what, name, limit in limits
    ]


BENCHMARKS = [Benchmark("pages", measure, rows, sides=("ours",))]
