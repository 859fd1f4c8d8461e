"""The results of a story as a part of a page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any

_HEAD = (
    "| step | rows/s | s | in Redis afterwards | server, µs/row | worst PING, p99 | live p50, p99 "
    "| server | Spark |\n|---|---|---|---|---|---|---|---|---|"
)


def page(
    steps: Sequence[dict[str, Any]], rows: int, master: str, command: str, server: Any, day: date
) -> str:
    """A section with a row for each step."""
    where = "a standalone cluster with two workers" if master == "cluster" else f"`{master}`"
    name = server.get("server_name", "redis")
    version = server.get(f"{name}_version", server["redis_version"])
    lines = [f"## {rows:,} rows on {where}", "", _HEAD, *map(_line, steps), ""]
    lines += [f"Measured on {day}, {name} {version}: `{command}`.", ""]
    return "\n".join(lines)


def _line(step: dict[str, Any]) -> str:
    rate = f"{step['rate']:,.0f}" if step["rows"] else "-"
    server_us = f"{step['server_us']:.1f}" if step["rows"] else "-"
    spark = f"{step['spark_mib']:,.0f} MiB" if step["spark_mib"] else "-"
    cells = (
        step["name"],
        rate,
        f"{step['seconds']:,.0f}",
        step["counts"],
        server_us,
        f"{step['stall_ms']:.0f}, {step['ping_p99_ms']:.1f} ms",
        f"{step['live_p50_ms']:.0f}, {step['live_p99_ms']:.0f} ms",
        f"{step['server_mib']:,.0f} MiB",
        spark,
    )
    return f"| {' | '.join(cells)} |"
