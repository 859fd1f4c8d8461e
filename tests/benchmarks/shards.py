"""What it costs the servers that a queue is spread over shards."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from kombu_delayed.connection.options import Options
from tests.benchmarks.load import Load, Nodes, OneNode
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig
from tests.kit.state import message

COUNTS = (1, 2, 3, 6, 12)
LIMIT = 1.15
TURNS = 5
TEXT = message("x" * 900)


def measure_on(nodes: Nodes, messages: int, turns: int, counts: Sequence[int] = COUNTS) -> Figures:
    """In turn, so that what else the machine does meets all.

    The processor time of all nodes for a message, and the most of one over the mean.
    """
    spent: dict[int, list[list[float]]] = {count: [] for count in counts}
    for _ in range(turns):
        for count, found in spent.items():
            found.append(Load(nodes, nodes.shards(count), messages, TEXT).run())
    figures: Figures = {}
    for count, found in spent.items():
        figures[f"{count}_us"] = median(map(sum, found))
        figures[f"{count}_spread"] = median(max(each) / mean(each) for each in found)
    return figures


def measure(rig: Rig) -> Figures:
    nodes = OneNode(rig, Options().events)
    return measure_on(nodes, rig.scaled(6_000, 1_000), rig.scaled(TURNS, 1))


def rows(ours: Figures) -> list[Row]:
    shown = ", ".join(f"{ours[f'{count}_us']:.0f}" for count in COUNTS)
    ratio = ours[f"{COUNTS[-1]}_us"] / ours[f"{COUNTS[0]}_us"]
    return [
        Row(
            f"one queue with {', '.join(map(str, COUNTS))} shards on one server: processor time "
            "of the server for a message",
            f"{COUNTS[-1]} shards ≤ {LIMIT} × one",  # noqa: RUF001
            NOTHING,
            f"{shown} µs",
            f"{ratio:.2f}",
            ratio <= LIMIT,
        )
    ]


BENCHMARKS = [Benchmark("shards", measure, rows, sides=("ours",))]
