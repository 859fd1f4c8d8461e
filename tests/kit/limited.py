"""Users of Redis and of Sentinels with the permissions that docs/operations.md names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import redis

from tests.kit.workers import ROOT

USER, PASSWORD = "shop", "secret"
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
#: The user of the Sentinels.
FINDER, FINDER_PASSWORD = "finder", "another"
#: The transport options that they use.
OPTIONS = {"global_keyprefix": "shop:"}


def rules_of(user: str) -> list[str]:
    """The permissions that the page gives a user."""
    return PAGE.partition(f"ACL SETUSER {user} ")[2].partition("```")[0].split()


@contextmanager
def limited(
    clients: Iterable[redis.Redis], user: str = USER, denied_to_it: str = "config"
) -> Iterator[None]:
    """A user on each server; at the end nothing was denied but CONFIG GET, or `denied_to_it`."""
    clients = list(clients)
    for client in clients:
        client.execute_command("ACL", "SETUSER", user, "reset", *rules_of(user))
        client.execute_command("ACL", "LOG", "RESET")
    try:
        yield
        log = [(entry["object"], entry) for client in clients for entry in client.acl_log()]
        # Redis 6.2 calls all of CLIENT dangerous; redis-py, which sends its version, does without.
        denied = [each for name, each in log if name != "client"]
        assert all(str(each["object"]).startswith(denied_to_it) for each in denied), denied
    finally:
        for client in clients:
            client.execute_command("ACL", "DELUSER", user)
