"""How far a long call is, for who waits for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click

#: Is given how many more are done.
Progress = Callable[[int], Any]


@contextmanager
def reporting(
    progress: bool | Progress | None, items: Iterable[Any], label: str
) -> Iterator[Progress]:
    """The function itself, a bar on the terminal for True, or nothing."""
    if callable(progress):
        yield progress
    elif progress and sys.stderr.isatty():
        with click.progressbar(items, label=label, show_pos=True, file=sys.stderr) as bar:
            yield bar.update
    else:
        yield lambda count: None
