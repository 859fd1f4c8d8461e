from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import time
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kombu_delayed.errors import UNREACHABLE, AccessDenied, ReplicaError, ServerError
from kombu_delayed.store.calls.scripts import _sources
from kombu_delayed.transport.server_checks import (
    OTHERS,
    REMOVES,
    Server,
    check,
    inspect,
    numbers_of,
)
from tests.kit import servers

GOOD = Server(
    version="7.2.4",
    eviction="noeviction",
    read_only_replica=False,
    may_run_scripts=True,
    persistent=True,
    partition_size=128,
)

LIMITED = Callable[..., redis.Redis]


@pytest.mark.parametrize("version", ["6.2.0", "6.2.18", "10.0.1", "255.255.255", ""])
def test_new_enough(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check(replace(GOOD, version=version))
    assert not caplog.records


@pytest.mark.parametrize("version", ["2.8.0", "6.1.9"])
def test_too_old(version: str) -> None:
    with pytest.raises(ServerError, match=rf"is Redis {version}; delayed messages need Redis 6\.2"):
        check(replace(GOOD, version=version))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"eviction": "volatile-lru"}, "maxmemory-policy is volatile-lru"),
        ({"eviction": "volatile-ttl"}, "of queues with an expiry"),
        ({"persistent": False}, "a restart loses every delayed message. Set appendonly yes"),
        ({"stops_with_others": True}, "with one node down for good all queues stop. Set cluster-"),
    ],
)
def test_warnings(change: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture) -> None:
    check(replace(GOOD, **change))
    assert text in caplog.text


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_eviction_of_everything(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    server, text = replace(GOOD, eviction=policy), f"maxmemory-policy is {policy}"
    with pytest.raises(ServerError, match=f"{text}.*delayed_unsafe_server=True"):
        check(server)
    check(server, unsafe_server=True)
    assert f"{text}: when it is full it drops messages." in caplog.text


def test_replica_is_a_connection_error_since_a_failover_may_end_it() -> None:
    text = "read-only replica; the broker URL has to name"
    with pytest.raises(ReplicaError, match=text) as caught:
        check(replace(GOOD, read_only_replica=True))
    assert isinstance(caught.value, UNREACHABLE)
    assert isinstance(caught.value, ServerError)


def test_scripts_forbidden() -> None:
    with pytest.raises(ServerError, match=r"ACL SETUSER <user> \+@scripting"):
        check(replace(GOOD, may_run_scripts=False))


AHEAD = (
    "The server's clock is {} seconds ahead of this machine's: tasks sent from here with a "
    "countdown are due that much earlier. Synchronise the clocks (NTP)."
)
BEHIND = AHEAD.replace("ahead of", "behind").replace("earlier", "later")


@pytest.mark.parametrize(
    ("ahead", "limit", "text"),
    [
        (10.1, 10, AHEAD.format(10)),
        (-86_400, 0.5, BEHIND.format(86_400)),
        (10, 10, None),
        (-10, 10, None),
        (1e9, 0, None),
    ],
)
def test_clock_skew(
    ahead: float, limit: float, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    check(replace(GOOD, ahead_seconds=ahead), clock_skew_warning_seconds=limit)
    assert [record.getMessage() for record in caplog.records] == ([text] if text else [])


# Real servers.


@pytest.fixture
def configured(client: redis.Redis) -> Iterator[Callable[[str, str], None]]:
    """Set a configuration value until the end of the test."""
    before: dict[str, str] = {}

    def configure(name: str, value: str) -> None:
        before.setdefault(name, client.config_get(name)[name])
        client.config_set(name, value)

    yield configure
    for name, value in before.items():
        client.config_set(name, value)


@pytest.fixture
def limited(server: servers.Server, client: redis.Redis) -> Iterator[LIMITED]:
    """Connect as a user with the given ACL rules."""
    clients: list[redis.Redis] = []

    def connect(*rules: str) -> redis.Redis:
        client.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", *rules)
        clients.append(server.client(username="limited", password="pw"))
        return clients[-1]

    yield connect
    for each in clients:
        each.close()
    client.execute_command("ACL", "DELUSER", "limited")


def test_inspect(client: redis.Redis) -> None:
    found = inspect(client)
    assert tuple(map(int, found.version.split(".")[:2])) >= (6, 2)
    assert abs(found.ahead_seconds) < 5
    assert replace(found, version="", ahead_seconds=0) == replace(
        GOOD, version="", persistent=False
    )


@pytest.mark.parametrize("ahead", [3600, -3600])
def test_inspect_clock(ahead: int, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kombu_delayed.transport.server_checks.time", lambda: time() - ahead)
    assert abs(inspect(client).ahead_seconds - ahead) < 5


@pytest.mark.parametrize(
    ("name", "value"), [("save", "3600 1"), ("appendonly", "yes")], ids=["snapshot", "log"]
)
def test_inspect_persistence(
    name: str, value: str, client: redis.Redis, configured: Callable[[str, str], None]
) -> None:
    configured(name, value)
    assert inspect(client).persistent


@pytest.mark.parametrize(("value", "size"), [("64", 64), ("512", 512), ("0", 2), ("1", 2)])
def test_inspect_compact_size(
    value: str, size: int, client: redis.Redis, configured: Callable[[str, str], None]
) -> None:
    sizes = client.config_get("zset-max-*-entries")
    configured(next(name for name in sizes if "list" in name), value)
    assert inspect(client).partition_size == size


@pytest.mark.parametrize("read_only", ["yes", "no"])
def test_inspect_replica(
    read_only: str, client: redis.Redis, configured: Callable[[str, str], None]
) -> None:
    configured("replica-read-only", read_only)
    client.replicaof("127.0.0.1", servers.free_port())
    try:
        assert inspect(client).read_only_replica == (read_only == "yes")
    finally:
        client.replicaof("NO", "ONE")
    assert not inspect(client).read_only_replica


def test_user_who_may_not_run_scripts(limited: LIMITED) -> None:
    found = inspect(limited("+@all", "-@scripting"))
    assert found == replace(found, may_run_scripts=False)
    with pytest.raises(ServerError, match="may not run Lua scripts"):
        check(found)


@pytest.mark.parametrize(
    ("rules", "denied"),
    [
        (["+@all"], ()),
        (["+@read", "+@write", "+@scripting", "-@dangerous"], ()),
        (["+@read", "+@scripting"], ()),
        (["+@read", "+@scripting", "+set"], ()),
        (["+@all", "-rpop"], ("RPOP",)),
        (["+@all", "-hset", "-hmget"], ("HMGET", "HSET")),
        (["+@write", "+@scripting", "+@read", "-hdel", "-unlink"], ("HDEL", "UNLINK")),
    ],
)
def test_user_who_may_use_only_some_of_what_scripts_call(
    rules: list[str], denied: tuple[str, ...], limited: LIMITED, client: redis.Redis
) -> None:
    """A script would stop half way: a message taken out of one key would be in no other."""
    found = inspect(limited(*rules), "kombu-delayed:format")
    if numbers_of(inspect(client).version) < (7, 0):
        pytest.skip("this server does not say what a user may do")
    assert found.denied == denied
    if denied:
        with pytest.raises(AccessDenied, match=rf"may not use {', '.join(denied)}\. Scripts"):
            check(found)
    else:
        check(found)


def test_the_commands_of_scripts_are_known() -> None:
    called = {
        command
        for text in _sources().values()
        for command in re.findall(r"redis\.p?call\('([A-Z]+)'", text)
    }
    without_keys = {"TIME", "PUBLISH", "SPUBLISH"}
    assert called - without_keys - {"XINFO"} == {*REMOVES, *OTHERS}


def test_user_who_may_not_see_the_configuration(limited: LIMITED) -> None:
    found = inspect(limited("+@all", "-config"))
    assert found.may_run_scripts
    assert found.partition_size == 128
    assert found.persistent
    check(found)


def test_user_who_may_see_nothing_is_not_refused(
    limited: LIMITED, caplog: pytest.LogCaptureFixture
) -> None:
    found = inspect(limited("+@all", "-config", "-info", "-time"))
    assert found == replace(GOOD, version="")
    check(found, clock_skew_warning_seconds=0.001)
    assert not caplog.records


def test_unreachable_server_is_not_swallowed() -> None:
    client = redis.Redis(port=servers.free_port(), retry=Retry(NoBackoff(), 0))
    with client, pytest.raises(redis.ConnectionError):
        inspect(client)
