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

#: The name, and the password, of a user who may do everything but list clients.
BLIND = "blind"

#: The channel of the Broadcast queue that the page has as an example.
BROADCAST = "&shop:/0.news/celery"


def rules_of(user: str, also: str = " ") -> list[str]:
    """The permissions that the page gives a user, in the block that begins with `also`."""
    block = PAGE.partition(f"ACL SETUSER {user}{also}")[2].partition("```")[0]
    assert block, (user, also)
    return block.split()


def more_rules() -> list[str]:
    """The permissions that the page adds for results in the same server and a Broadcast queue."""
    assert BROADCAST in PAGE
    return [*rules_of(USER, "\n"), BROADCAST]


@contextmanager
def limited(
    clients: Iterable[redis.Redis],
    user: str = USER,
    denied_to_it: str = "config",
    more: Iterable[str] = (),
) -> Iterator[None]:
    """A user on each server; at the end nothing was denied but CONFIG GET, or `denied_to_it`."""
    clients = list(clients)
    for client in clients:
        client.execute_command("ACL", "SETUSER", user, "reset", *rules_of(user), *more)
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


@contextmanager
def blind_user(client: redis.Redis) -> Iterator[None]:
    """A user who may not list clients, as those of the page: they may do nothing dangerous."""
    rules = {"categories": ["+@all"], "commands": ["-client"], "keys": ["*"], "channels": ["*"]}
    client.acl_setuser(BLIND, enabled=True, passwords=[f"+{BLIND}"], reset=True, **rules)
    try:
        yield
    finally:
        client.acl_deluser(BLIND)
