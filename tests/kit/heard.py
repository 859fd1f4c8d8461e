"""The arguments with which Celery sends its signals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def heard(signal: Any) -> Iterator[list[dict[str, Any]]]:
    """Collects the arguments of each time that a signal is sent, including the sender."""
    said: list[dict[str, Any]] = []

    def listen(**given: Any) -> None:
        said.append(given)

    signal.connect(listen)
    try:
        yield said
    finally:
        signal.disconnect(listen)
