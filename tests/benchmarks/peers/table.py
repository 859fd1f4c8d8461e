"""The four measurements of each system, as a table."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.peers.measures import MEASURES, Peer
from tests.benchmarks.peers.systems import SYSTEMS, System
from tests.benchmarks.report import Figures, medians

HEAD = """\
| system | sent/s | run/s | lateness p50 | p99 | on time after a kill | versions |
|---|---|---|---|---|---|---|
"""


def measured(system: System, rounds: int, quick: bool) -> tuple[str, Figures]:
    """Its versions, and the medians of its figures; each measurement has a fresh server."""
    versions, found = "", []
    for _ in range(rounds):
        figures: Figures = {}
        # In-memory queues end with their process: only one that sends and runs can be measured.
        measures = MEASURES if system.server else MEASURES[:2]
        for measure in measures:
            with ExitStack() as stack:
                temporary = tempfile.TemporaryDirectory(prefix="kombu-delayed-peer-")
                peer = Peer(system, Path(stack.enter_context(temporary)), stack)
                versions = versions or peer.call("versions")
                figures |= measure(peer, quick)
        found.append(figures)
    return versions, medians(found)


def row(system: System, versions: str, figures: Figures) -> str:
    shown = {"sent": "{:,.0f}", "run": "{:,.0f}", "p50_ms": "{:,.1f} ms", "p99_ms": "{:,.1f} ms"}
    shown["in_time"] = "{:,.0f}"
    cells = [form.format(figures[name]) if name in figures else "-" for name, form in shown.items()]
    return f"| {' | '.join([system.name, *cells, versions])} |"


def measure_peers(rounds: int, quick: bool, say: Callable[[str], None]) -> tuple[str, list[str]]:
    """The table in Markdown, and the systems whose measurement failed."""
    lines, failed = [], []
    for system in SYSTEMS:
        if reason := system.missing():
            lines.append(_without(system, f"not measured: {reason}"))
            continue
        try:
            versions, figures = measured(system, rounds, quick)
        except Exception as error:
            failed.append(system.name)
            lines.append(_without(system, f"failed: {str(error).splitlines()[0][:80]}"))
            continue
        say(f"{system.name:<32} {figures}")
        lines.append(row(system, versions, figures))
    return HEAD + "\n".join(lines) + "\n", failed


def _without(system: System, reason: str) -> str:
    return f"| {system.name} | {reason} | | | | | |"
