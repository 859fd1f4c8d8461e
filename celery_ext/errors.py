"""What this extension raises, beyond what kombu_delayed does."""

from __future__ import annotations

from kombu_delayed.errors import DelayedError


class BrokerError(DelayedError):
    """The app's broker keeps no backlog: put `delayed+` in front of its URL."""


class QueryError(DelayedError, ValueError):
    """A query has a criterion that cannot be meant."""
