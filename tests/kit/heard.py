"""What Celery's signals are sent with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def heard(signal: Any) -> Iterator[list[dict[str, Any]]]:
    """Each time that a signal is sent: its arguments, the sender among them."""
    said: list[dict[str, Any]] = []

    def listen(**given: Any) -> None:
        said.append(given)

    signal.connect(listen)
    try:
        yield said
    finally:
        signal.disconnect(listen)
