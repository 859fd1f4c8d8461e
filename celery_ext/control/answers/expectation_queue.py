"""The queue of an app's expectations, and their names there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from celery import Celery
from kombu.exceptions import OperationalError

from celery_ext.app.broker import Broker, own_broker
from celery_ext.errors import ExpectationError
from kombu_delayed.inspection.expectations import Correlation

from .options import ExpectationOptions

T = TypeVar("T")

#: The prefix of an expectation's name among the unique keys of its queue.
PREFIX = "expect:"

KEY_LENGTH = 1_000


def name_of(key: str, tenant: str | None) -> str:
    """The name of a tenant's key in the broker. Raises ExpectationError if either is invalid."""
    for what, text, least in (("a key", key, 1), ("a tenant", tenant or "", 0)):
        if not isinstance(text, str) or not least <= len(text) <= KEY_LENGTH:
            raise ExpectationError(
                f"{what} is text of {least} to {KEY_LENGTH:,} characters, not {text!r}"[:300]
            )
    return PREFIX + json.dumps([tenant or "", key])


def key_of(name: str) -> tuple[str, str | None]:
    tenant, key = json.loads(name.removeprefix(PREFIX))
    return key, tenant or None


class ExpectationQueue:
    """The queue of an app's expectations. `broker` is by default this process's own."""

    def __init__(self, app: Celery, broker: Broker | None = None) -> None:
        self.app = app
        self.options = ExpectationOptions.of(app)
        self.broker = broker or own_broker(app)

    @property
    def correlation(self) -> Correlation:
        return Correlation(self.broker.store, self.options.queue)

    def move(self, call: Callable[[Correlation], T]) -> T:
        """Make an idempotent call, and repeat it if the connection was lost meanwhile.

        Raises Kombu's OperationalError if the broker cannot be reached.
        """
        try:
            return call(self.correlation)
        except OperationalError:
            return call(self.correlation)
