"""An operator who pauses queues and tenants, and changes limits, while tasks run."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from celery import Celery

from tests.crash import limits

#: How long each change lasts, at least and at most.
SECONDS = 1.0, 3.0
#: How often, and at which interval, an operator retries while the broker is out of reach.
TRIES, AGAIN_SECONDS = 120, 0.5

TENANT = "bea"
#: Queue and limit, of one queue and of several.
LIMITS = ((limits.TURNS, "customer"), (limits.CALLS, f"global/{limits.PROVIDER}"))


class Operator:
    """Makes a change and undoes it a moment later, while everything else happens."""

    def __init__(self, app: Celery) -> None:
        self._delayed: Any = app.delayed  # type: ignore[attr-defined]

    def pause_queue(self, rng: random.Random, ended: Callable[[], None]) -> None:
        queue = rng.choice(limits.QUEUES)
        self._do(
            rng, lambda: self._delayed.pause(queue), lambda: self._delayed.resume(queue), ended
        )

    def pause_tenant(self, rng: random.Random, ended: Callable[[], None]) -> None:
        part: dict[str, Any] = {"queue": limits.TURNS, "tenant": TENANT}
        self._do(
            rng, lambda: self._delayed.pause(**part), lambda: self._delayed.resume(**part), ended
        )

    def lower_limit(self, rng: random.Random, ended: Callable[[], None]) -> None:
        """Lower a limit. It is never raised above its declared value, which the verdict expects."""
        name = rng.choice(LIMITS)
        self._do(
            rng,
            lambda: self._delayed.set_limit(*name, concurrency=1),
            lambda: self._delayed.reset_limit(*name),
            ended,
        )

    def _do(
        self,
        rng: random.Random,
        begin: Callable[[], Any],
        end: Callable[[], Any],
        ended: Callable[[], None],
    ) -> None:
        seconds = rng.uniform(*SECONDS)

        def work() -> None:
            _insist(begin)
            time.sleep(seconds)
            _insist(end)
            ended()

        threading.Thread(target=work, name="operator", daemon=True).start()


def _insist(action: Callable[[], Any]) -> None:
    for _ in range(TRIES):
        try:
            action()
            return
        except Exception:  # the broker is away
            time.sleep(AGAIN_SECONDS)
