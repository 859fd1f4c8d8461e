"""300 delayed Celery tasks and a worker that is killed: with this transport and with the stock one.

Starts a server and three workers for each transport, in a temporary directory, and ends them all.
"""

from __future__ import annotations

import contextlib
import io
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
from demo_side import START_SECONDS, Side, State, Worker
from demo_tasks import LEASE_SECONDS
from demo_view import View, closing, comparison
from rich.console import Console, Group
from rich.text import Text

FIRST_SECONDS, LAST_SECONDS = 3, 15
KILL_AFTER_SECONDS = (FIRST_SECONDS + LAST_SECONDS) / 2
PATIENCE_SECONDS = 5
SEED = 7


def run(view: View, sides: Sequence[Side], tasks: int) -> list[State]:
    """The whole story; returns how it ended for each side."""
    view.say("starting two servers, and three workers each, one after the other")
    for side in sides:
        side.start_server()
    for _ in range(3):
        await_ready(view, [side.start_worker() for side in sides])
    view.say(f"scheduling {tasks} tasks, due in {FIRST_SECONDS} to {LAST_SECONDS} s")
    began = time.time()
    schedule(view, sides, tasks)
    wait(view, lambda: time.time() >= began + KILL_AFTER_SECONDS, LAST_SECONDS)
    view.say("killing worker-2 with SIGKILL, and starting worker-4")
    for side in sides:
        kill(side.workers[1])
        side.start_worker()
    wait(view, lambda: False, LEASE_SECONDS)
    view.snapshot()
    last_due = max(max(side.due.values()) for side in sides)
    wait(view, lambda: time.time() >= last_due, LAST_SECONDS)
    view.say(f"all are due; waiting up to {PATIENCE_SECONDS} s for what has not run")
    wait(view, lambda: not any(s.state().missing for s in sides), PATIENCE_SECONDS)
    return [side.state() for side in sides]


def schedule(view: View, sides: Sequence[Side], tasks: int) -> None:
    """The same tasks for every side, in no particular order."""
    began = time.time()
    chance = random.Random(SEED)
    span = LAST_SECONDS - FIRST_SECONDS
    offsets = [FIRST_SECONDS + span * i / max(tasks - 1, 1) for i in range(tasks)]
    chance.shuffle(offsets)
    for number, offset in enumerate(offsets):
        for side in sides:
            side.schedule(number, max(offset - (time.time() - began), 0.1))
        view.refresh()


def kill(worker: Worker) -> None:
    """Kill a worker, in the middle of a task if one comes its way within a second."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and all(run.ended for run in worker.runs()):
        time.sleep(0.005)
    worker.kill()


def await_ready(view: View, workers: Sequence[Worker]) -> None:
    wait(view, lambda: all(worker.ready for worker in workers) or _ended(workers), START_SECONDS)
    for worker in workers:
        if not worker.ready:
            raise SystemExit(f"{worker.name} did not start:\n{worker.log.read_text()[-2000:]}")


def _ended(workers: Sequence[Worker]) -> bool:
    return any(worker.process.poll() is not None for worker in workers)


def wait(view: View, done: Callable[[], bool], seconds: float) -> None:
    """Show what happens until `done`, for `seconds` at most."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        view.refresh()
        time.sleep(0.05)


@contextlib.contextmanager
def both_sides() -> Iterator[list[Side]]:
    """Two sides in a temporary directory; whatever happens, nothing of them is left."""
    with tempfile.TemporaryDirectory(prefix="kombu-delayed-demo-") as directory:
        base = Path(directory).resolve()
        sides = [
            Side("delayed+redis://", base / "ours", delayed=True),
            Side("redis:// (stock)", base / "stock", delayed=False),
        ]
        try:
            yield sides
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            with contextlib.ExitStack() as stack:  # the one is stopped even if the other fails to
                for side in sides:
                    stack.callback(side.stop)


def headline(tasks: int) -> Group:
    return Group(
        Text(f"{tasks} delayed Celery tasks, and a worker that is killed half way", style="bold"),
        Text(
            "Twice at the same time, each on a server of its own: on kombu-delayed, where\n"
            "tasks wait in Redis, and on the stock Redis transport, where workers hold them.\n"
            "It takes half a minute; Ctrl-C ends everything.\n"
        ),
    )


def picture(path: Path, tasks: int, view: View, states: Sequence[State]) -> None:
    """Save what was shown as an SVG file."""
    console = Console(record=True, width=82, file=io.StringIO(), force_terminal=True)
    console.print(headline(tasks), *view.half_way, Text(), *ending(states), sep="\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(console.export_svg(title="make demo"))


def ending(states: Sequence[State]) -> tuple[object, ...]:
    return comparison(states), closing(states, LEASE_SECONDS, PATIENCE_SECONDS)


def verdict(ours: State) -> str | None:
    """None, or what went wrong, with what the workers logged."""
    if not ours.missing and not ours.run_twice:
        return None
    logs = "".join(f"\n{w.name}:\n{w.log.read_text()[-1000:]}" for w in ours.side.workers)
    return f"kombu-delayed lost {ours.missing} tasks and ran {ours.run_twice} twice.{logs}"


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


@click.command()
@click.option("--tasks", type=click.IntRange(10, 5000), default=300, show_default=True)
@click.option("--save-picture", type=click.Path(path_type=Path), help="An SVG file to write.")
def main(tasks: int, save_picture: Path | None) -> None:
    """Run delayed tasks on this transport and on the stock one, side by side."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    console = Console()
    console.print(headline(tasks))
    with both_sides() as sides:
        view = View(console, sides)
        with view.running():
            states = run(view, sides, tasks)
        console.print(*ending(states), sep="\n")
        if save_picture:
            picture(save_picture, tasks, view, states)
        failure = verdict(states[0])
    sys.exit(failure)


if __name__ == "__main__":
    main()
