"""Reports the progress of a long call to its caller."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click

#: Is called with the number of items that are done since the last call.
Progress = Callable[[int], Any]


@contextmanager
def reporting(
    progress: bool | Progress | None, items: Iterable[Any], label: str
) -> Iterator[Progress]:
    """Yields the given function, or one that moves a bar on the terminal (True) or does nothing."""
    if callable(progress):
        yield progress
    elif progress and sys.stderr.isatty():
        with click.progressbar(items, label=label, show_pos=True, file=sys.stderr) as bar:
            yield bar.update
    else:
        yield lambda count: None
