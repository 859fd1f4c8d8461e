"""Revokes tasks by id, and remembers them for workers that were not running."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kombu.utils.functional import maybe_list

from kombu_delayed.store.calls.caller import chunks, without_errors
from kombu_delayed.store.keys import revoked_tasks

from ...app.broker import Broker
from ...app.queues import Queues
from .moves import Moves

Arguments = Mapping[str, Any]

#: The remote control commands that take ids.
BY_ID = ("revoke", "terminate")

#: How long a revoke is remembered, and how many are.
KEPT_SECONDS, KEPT_IDS = 7 * 86_400, 50_000

#: Maximum length of an id; a longer one is not from Celery.
ID_LENGTH = 255

#: How many ids one call reads.
PAGE_SIZE = 5_000


class Revoked:
    """The revoked tasks of a broker, in one bounded key.

    The key has no expiry, because a server may evict keys that have one.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def _key(self) -> str:
        return revoked_tasks(self._broker.store.keys("").prefix)

    def remember(self, ids: Sequence[str]) -> None:
        """Remember that these tasks were revoked. They replace the oldest if there are too many."""
        run, key, now_us = self._broker.store.run, self._key, time.time_ns() // 1000
        known = [id for id in dict.fromkeys(ids) if len(id) <= ID_LENGTH]
        for part in chunks(known[-KEPT_IDS:]):
            scores = [each for n, id in enumerate(part) for each in (now_us + n, id)]
            without_errors(
                run.many(
                    [
                        ("ZADD", key, *scores),
                        ("ZREMRANGEBYSCORE", key, "-inf", now_us - KEPT_SECONDS * 1_000_000),
                        ("ZREMRANGEBYRANK", key, 0, -KEPT_IDS - 1),
                    ]
                )
            )

    def unknown(self, ids: Sequence[str]) -> list[str]:
        """The given tasks that are not remembered as revoked."""
        run, key = self._broker.store.run, self._key
        found = [score for part in chunks(ids) for score in run("ZMSCORE", key, *part)]
        return [id for id, score in zip(ids, found, strict=True) if score is None]

    def since(self, at: float) -> list[str]:
        """The tasks that were revoked at this time or later, in seconds since the epoch."""
        run, key, found = self._broker.store.run, self._key, list[str]()
        at_us = int(max(at, time.time() - KEPT_SECONDS) * 1_000_000)
        while len(found) < KEPT_IDS:
            page = run("ZRANGEBYSCORE", key, at_us, "+inf", "LIMIT", len(found), PAGE_SIZE)
            found += [id.decode(errors="surrogateescape") for id in page]
            if len(page) < PAGE_SIZE:
                break
        return found


def ids_in(arguments: Arguments) -> list[str]:
    """The task ids in the arguments of such a command."""
    return [*dict.fromkeys(str(each) for each in maybe_list(arguments.get("task_id")) or ())]


def revoke(queues: Queues, ids: list[str]) -> None:
    """Remember these tasks as revoked, and take those that are delayed out of the backlog."""
    Revoked(queues).remember(ids)  # first, so that workers refuse what becomes ready meanwhile
    Moves(queues).cancel_ids(ids, None)
