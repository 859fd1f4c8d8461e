"""A Redis user with the rights that docs/operations.md names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import redis

from kombu_delayed.server import ACL_COMMANDS, ACL_PATTERNS

USER, PASSWORD = "shop", "secret"
RULES = ("reset", "on", f">{PASSWORD}", *ACL_COMMANDS.split(), *ACL_PATTERNS.split())
#: The transport options that they go with.
OPTIONS = {"global_keyprefix": "shop:"}


@contextmanager
def limited(clients: Iterable[redis.Redis]) -> Iterator[None]:
    """A user on each server; at the end nothing was denied but CONFIG GET."""
    clients = list(clients)
    for client in clients:
        client.execute_command("ACL", "SETUSER", USER, *RULES)
        client.execute_command("ACL", "LOG", "RESET")
    try:
        yield
        denied = [entry for client in clients for entry in client.acl_log()]
        assert [e for e in denied if not str(e["object"]).startswith("config")] == []
    finally:
        for client in clients:
            client.execute_command("ACL", "DELUSER", USER)
