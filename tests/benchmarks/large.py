"""The cost of a snapshot and of a restart for a server with millions of delayed tasks."""

from __future__ import annotations

import time
from typing import Any

from tests.benchmarks.app import QUEUE
from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import Rig, fill, sample, store_of
from tests.kit.wait import wait_until

SIZES = 1_000_000, 5_000_000
PAYLOAD_BYTES = 300
SAVE_SECONDS = 300


def measure(rig: Rig, count: int) -> Figures:
    """Memory of each task, and the times of a fork, a snapshot and a start that reads it."""
    rig.redis.execute_command("FLUSHALL", "SYNC")
    before = _info(rig, "memory")["used_memory"]
    fill(store_of(rig), QUEUE, count, sample(rig, PAYLOAD_BYTES))
    used = _info(rig, "memory")["used_memory"] - before
    began = time.monotonic()
    rig.redis.bgsave()
    wait_until(
        lambda: not _info(rig, "persistence")["rdb_bgsave_in_progress"], "it is saved", SAVE_SECONDS
    )
    saved = time.monotonic() - began
    fork_ms = _info(rig, "stats")["latest_fork_usec"] / 1000
    rig.server.stop()
    began = time.monotonic()
    rig.server.start()
    loaded = time.monotonic() - began
    assert store_of(rig).size(QUEUE).delayed == count
    figures = {"bytes": used / count, "gib": used / 2**30, "fork": fork_ms}
    return {**figures, "saved": saved, "loaded": loaded, "count": float(count)}


def _info(rig: Rig, section: str) -> dict[str, Any]:
    return dict(rig.redis.info(section))


def _lines(size: int) -> tuple[Line, Line]:
    key = f"{size}"
    return (
        Line(
            f"{{{key} count:,.0f}} delayed tasks with {PAYLOAD_BYTES} B of arguments: memory of "
            "the server, for each",
            f"{{{key} gib:.1f}} GiB, {{{key} bytes:,.0f}} B",
        ),
        Line(
            "the same: how long a fork blocks the server; a snapshot takes; a start from it takes",
            f"{{{key} fork:.0f}} ms; {{{key} saved:.0f}} s; {{{key} loaded:.0f}} s",
        ),
    )


@benchmark("large", *(line for size in SIZES for line in _lines(size)), rounds=1, server="redis")
def large(rig: Rig) -> Figures:
    return {
        f"{size} {name}": value
        for size in SIZES
        for name, value in measure(rig, rig.scaled(size, size // 100)).items()
    }
