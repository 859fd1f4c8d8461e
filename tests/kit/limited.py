"""A Redis user with the rights that docs/operations.md names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import redis

from tests.kit.workers import ROOT

USER, PASSWORD = "shop", "secret"
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
#: What the page gives its user.
RULES = PAGE.partition(f"ACL SETUSER {USER} ")[2].partition("```")[0].split()
#: The transport options that they go with.
OPTIONS = {"global_keyprefix": "shop:"}


@contextmanager
def limited(clients: Iterable[redis.Redis]) -> Iterator[None]:
    """A user on each server; at the end nothing was denied but CONFIG GET."""
    clients = list(clients)
    for client in clients:
        client.execute_command("ACL", "SETUSER", USER, "reset", *RULES)
        client.execute_command("ACL", "LOG", "RESET")
    try:
        yield
        denied = [entry for client in clients for entry in client.acl_log()]
        assert [e for e in denied if not str(e["object"]).startswith("config")] == []
    finally:
        for client in clients:
            client.execute_command("ACL", "DELUSER", USER)
