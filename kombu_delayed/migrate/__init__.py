"""Moves messages from the stock Redis transport to this one, and back.

python -m kombu_delayed.migrate to-delayed redis://localhost:6379/0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kombu import Connection
from redis.exceptions import RedisError

from ..connection.options import PREFIX, unknown
from ..errors import UNREACHABLE, DelayedError
from .hand_back import ToStock
from .migration import Entry, Left, Migration, Move, Progress, Report
from .take_over import ToDelayed

if TYPE_CHECKING:
    from ..transport.channel.channel import Channel

__all__ = [
    "FAILURES",
    "Direction",
    "Entry",
    "Left",
    "Migration",
    "MigrationRefused",
    "Move",
    "Report",
    "ToDelayed",
    "ToStock",
    "open_channel",
    "plan",
    "to_delayed",
    "to_stock",
]

Direction: TypeAlias = Literal["to-delayed", "to-stock"]

#: The errors that a migration may raise.
FAILURES: tuple[type[BaseException], ...] = (DelayedError, RedisError, *UNREACHABLE)


class MigrationRefused(DelayedError):
    """The messages cannot be moved safely at this time."""


_DIRECTIONS: Mapping[str, Any] = {"to-delayed": ToDelayed, "to-stock": ToStock}


def plan(channel: Channel, direction: Direction, **options: Any) -> Report:
    """A preview of a migration, with the reasons to refuse it. Changes nothing.

    `options` are those of `to_delayed` or `to_stock`.
    """
    migration: Migration = _DIRECTIONS[direction](channel, dry=True, **options)
    migration.report.blockers = migration.blockers()
    return migration.run()


def to_delayed(
    channel: Channel,
    *,
    queues: Iterable[str] = (),
    older_than_seconds: float | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Move messages held by stock workers for `older_than_seconds`, and ready ETA messages.

    `older_than_seconds` is the stock transport's `visibility_timeout` unless told otherwise.
    Calling it twice is safe. Raises MigrationRefused if stock workers are running, unless `force`.
    """
    migration = ToDelayed(channel, queues, older_than_seconds=older_than_seconds)
    return _checked(migration, force).run(progress)


def to_stock(
    channel: Channel,
    *,
    queues: Iterable[str] = (),
    force: bool = False,
    dead: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Make the whole backlog ready for stock workers, which hold it until it is due.

    `dead` also makes dead letters ready, except those that would stop a stock worker. `force` also
    moves messages that a stock worker would run too early, or drop. Calling it twice is safe.
    Raises MigrationRefused if consumers of this transport are running, unless `force`.
    """
    return _checked(ToStock(channel, queues, force=force, dead=dead), force).run(progress)


def _checked(migration: Migration, force: bool) -> Migration:
    migration.report.blockers = migration.blockers()
    if migration.report.blockers and not force:
        raise MigrationRefused("; ".join(migration.report.blockers))
    return migration


@contextmanager
def open_channel(url: str, **transport_options: Any) -> Iterator[Channel]:
    """A channel on a server, from a URL of either transport."""
    url = ";".join(map(_ours, url.split(";")))  # Kombu splits a list of Sentinels there, too
    with Connection(url, transport_options=transport_options) as connection:
        connection.connect()
        channel = connection.channel()
        known = channel.from_transport_options
        for name in transport_options:  # with a wrong one, no message would be found
            if name not in known and not name.startswith(PREFIX):
                raise unknown(name, known)
        yield channel


def _ours(url: str) -> str:
    """A URL of the stock transport, or a part of one, as this transport has it."""
    if url.startswith("delayed+") or "://" not in url:
        return url
    return f"delayed+{url.removeprefix('redis+')}"  # stock: redis+socket://
