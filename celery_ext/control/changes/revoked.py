"""Which tasks were revoked lately, for workers that were not there to hear of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kombu_delayed.store.calls.caller import chunks, without_errors
from kombu_delayed.store.keys import revoked_tasks

from ...app.broker import Broker

#: So long a revoke is remembered, and so many of them.
KEPT_SECONDS, KEPT_IDS = 7 * 86_400, 50_000

#: An id that is longer is none of Celery's.
ID_LENGTH = 255

#: Ids that one call reads.
PAGE_SIZE = 5_000


class Revoked:
    """The revoked tasks of a broker, in one bounded key. A server may evict what has an expiry."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def _key(self) -> str:
        return revoked_tasks(self._broker.store.keys("").prefix)

    def remember(self, ids: Sequence[str]) -> None:
        """Remember that these tasks were revoked, in place of the oldest where there are many."""
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
