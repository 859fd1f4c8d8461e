"""The pools of connections that all apps of this process share."""

from __future__ import annotations

from kombu import pools


def forget_connections() -> None:
    """Let new apps connect anew, and older ones keep their connections."""
    pools.connections.clear()
    pools.producers.clear()
