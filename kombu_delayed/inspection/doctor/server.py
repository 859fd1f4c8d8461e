"""What the settings and the clock of a server make one fear."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from redis import Redis

from ...store.store import Store
from ...transport.server_checks import check, inspect
from ...transport.server_checks import logger as server_logger
from .faults import Finding

#: So far may the server's clock be from this machine's.
CLOCK_SKEW_SECONDS = 2.0


def examine_server(store: Store) -> Finding | None:
    """What the server's settings and clock make one fear; None: nothing.

    Raises ServerError where they make it unfit.
    """
    finding = Finding("server")
    with _warnings() as texts:
        for server in store.run.everywhere():
            found = inspect(Redis(connection_pool=server.pool))
            check(found, clock_skew_warning_seconds=CLOCK_SKEW_SECONDS)
    for text in texts:
        finding.count += 1
        finding.examples.append(text)
    return finding if finding.count else None


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What a check of the server warns of."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    server_logger.logger.addHandler(handler)
    try:
        yield texts
    finally:
        server_logger.logger.removeHandler(handler)
