"""Examines the settings and the clock of a server, and the format and types of its keys."""

from __future__ import annotations

from collections.abc import Iterable

from redis import Redis

from ...connection.format import MAJOR
from ...store.keys import types_of
from ...store.store import Store
from ...transport.server_checks import inspect, refuse, worries
from .examination import Finding

#: How far the server's clock may be from this machine's.
CLOCK_SKEW_SECONDS = 2.0


def examine_format(store: Store) -> Finding | None:
    """Return a finding if an upgrade would raise the format; None if it is the newest one.

    Raises FormatError if the messages have a format that is newer than this version.
    """
    if store.format is None:
        return None
    store.format.look(store.run, store.run.everywhere)
    if store.format.major in (0, MAJOR):
        return None
    text = (
        f"the messages have format {store.format.major}, in which all payloads of a queue are in "
        f"one key. When every process has this version of kombu-delayed, raise it to {MAJOR}: "
        "celery delayed doctor --upgrade"
    )
    return Finding("format", count=1, examples=[text])


def upgrade(store: Store, queues: Iterable[str]) -> bool:
    """Raise the format of a database and convert its queues. Returns whether it was older.

    If it was interrupted, another call continues there. Processes of older versions stop when they
    notice. Raises FormatError.
    """
    if store.format is None:
        return False
    was_older = store.format.upgrade(store.run)
    for queue in queues:
        keys = store.keys(queue)
        for hash in (keys.messages, keys.dead_messages, keys.dead_reasons):
            for _ in store.in_pages("spread_out", queue, hash=hash, count=100):
                pass
    return was_older


def examine_types(store: Store, queue: str) -> Finding | None:
    """Report keys of a queue that another program has overwritten: all else fails at them."""
    types, finding = types_of(store.keys(queue)), Finding("foreign", queue)
    answers = store.run.many([("TYPE", key) for key in types])
    for (key, type), found in zip(types.items(), answers, strict=True):
        if isinstance(found, bytes) and found.decode() not in ("none", type):
            finding.add(f"{key} is a {found.decode()}, not a {type}", fixed=False)
    return finding if finding.count else None


def examine_server(store: Store) -> Finding | None:
    """Report risks in the servers' settings and clocks; None if there are none.

    Raises ServerError if a server is unfit.
    """
    texts: list[str] = []
    for server in store.run.everywhere():
        found = inspect(Redis(connection_pool=server.pool))
        refuse(found)
        texts += worries(found, CLOCK_SKEW_SECONDS)
    return Finding("server", count=len(texts), examples=texts) if texts else None
