"""What the demo prints: a live table on a terminal, plain lines elsewhere, then the comparison."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from demo_side import Side, State, Worker
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

LINE_SECONDS = 2.0
LOOK_SECONDS = 0.25


class View:
    """Shows both sides while they run."""

    def __init__(self, console: Console, sides: Sequence[Side]) -> None:
        self.console = console
        self.sides = sides
        self.began = time.monotonic()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self.said: list[Text] = []
        self.half_way: list[RenderableType] = []
        self._look_at = self._line_at = 0.0

    def running(self) -> AbstractContextManager[Any]:
        return self._live or nullcontext()

    def say(self, text: str) -> None:
        """What happens now."""
        self.said.append(Text(f"{time.monotonic() - self.began:5.1f} s  {text}", style="bold"))
        self.console.print(self.said[-1], soft_wrap=True)
        self._look_at = 0.0
        self.refresh()

    def snapshot(self) -> None:
        """Keep what can be seen now, for a picture."""
        self.half_way = [*self.said, Text(), progress([side.state() for side in self.sides])]

    def refresh(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        if self._live:
            self._live.update(progress([side.state() for side in self.sides]), refresh=True)
        elif now >= self._line_at and self.sides[0].due:
            self._line_at = now + LINE_SECONDS
            for side in self.sides:
                self.console.print(
                    f"{now - self.began:5.1f} s  {_line(side.state())}", soft_wrap=True
                )


def progress(states: Sequence[State]) -> Table:
    """The state of both sides in the middle of a run."""
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("")
    for state in states:
        table.add_column(state.side.title, justify="right", style=_colour(state.side), min_width=18)
    scheduled = any(state.side.due for state in states)
    rows: list[tuple[str, Any]] = [
        ("delayed, not due yet", lambda s: s.delayed),
        ("  waiting in Redis", lambda s: s.side.in_redis() if scheduled else 0),
        ("  held by workers", lambda s: s.side.in_workers() if scheduled else 0),
        ("due and not done", lambda s: s.overdue),
        ("done", lambda s: len(s.done)),
    ]
    rows += [(f"  by {name}", lambda s, i=i: _by(s, i)) for i, name in enumerate(_names(states))]
    rows += [("lateness p50, max", lambda s: f"{_ms(s.percentile(0.5))}, {_ms(s.percentile(1))}")]
    for what, value in rows:
        table.add_row(what, *(str(value(state)) for state in states))
    return table


def comparison(states: Sequence[State]) -> Table:
    """What became of all tasks."""
    table = Table(title_justify="left", min_width=79)
    table.add_column("")
    for state in states:
        table.add_column(state.side.title, justify="right", style=_colour(state.side))
    rows: list[tuple[str, Any]] = [
        ("scheduled", lambda s: len(s.side.due)),
        ("run", lambda s: len(s.done)),
        ("lost *", lambda s: _alarming(s.missing)),
        ("run twice", lambda s: _alarming(s.run_twice)),
        ("interrupted by the kill and run again", lambda s: s.interrupted),
        ("lateness p50", lambda s: _ms(s.percentile(0.5))),
        ("lateness p99", lambda s: _ms(s.percentile(0.99))),
        ("lateness max", lambda s: _ms(s.percentile(1))),
    ]
    rows += [
        (f"tasks of {name}", lambda s, i=i: _by(s, i)) for i, name in enumerate(_names(states))
    ]
    for what, value in rows:
        table.add_row(what, *(_text(value(state)) for state in states))
    return table


def closing(states: Sequence[State], lease_seconds: float, patience_seconds: float) -> Group:
    """What the comparison's numbers mean, and what to do next."""
    missing = states[-1].missing
    return Group(
        Text(
            f"* Not run {patience_seconds:g} s after the last due time. The stock transport keeps "
            f"{missing} for\n"
            "  the killed worker, and gives them to others when their visibility timeout is\n"
            "  over: an hour by default. Here a killed worker's tasks wait for the end of its\n"
            f"  lease: {lease_seconds:g} s in this demo, 30 s by default.\n",
            style="dim",
        ),
        Text.assemble(
            "Try it: pip install kombu-delayed, and put delayed+ in front of your broker URL:\n",
            ("delayed+redis://localhost:6379/0", "bold green"),
        ),
    )


def _names(states: Sequence[State]) -> list[str]:
    most: list[Worker] = max((state.side.workers for state in states), key=len)
    killed = {w.name for state in states for w in state.side.workers if w.killed_at is not None}
    return [w.name + (" (killed)" if w.name in killed else "") for w in most]


def _by(state: State, index: int) -> int | str:
    workers = state.side.workers
    return state.done_by(workers[index]) if index < len(workers) else "-"


def _line(state: State) -> str:
    counts = f"delayed {state.delayed:3} (held by workers {state.side.in_workers():3})"
    done = f"due {state.overdue:2}  done {len(state.done):3}"
    return f"{state.side.title}  {counts}  {done}  late p50 {_ms(state.percentile(0.5))}"


def _colour(side: Side) -> str:
    return "green" if side.delayed else "yellow"


def _alarming(count: int) -> Text:
    return Text(str(count), style="bold red" if count else "")


def _text(value: Any) -> Text:
    return value if isinstance(value, Text) else Text(str(value))


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} ms" if value < 100 else f"{value / 1000:.2f} s"
