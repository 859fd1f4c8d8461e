from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.connection import Connection

from kombu_delayed.wire import Wire, pack
from tests.kit.servers import Server


@pytest.mark.parametrize(
    "command",
    [
        ("PING",),
        ("EVALSHA", "a" * 40, 2, "q", "{q}:wake", 0, -1, "", "x" * 100_000),
        ("HDEL", "{ü}", 1, 10**15, b"\x00\xff\r\n", "ü\r\n"),
        ("BZPOPMIN", "k", 2.5),
    ],
)
def test_commands_are_packed_as_redis_py_does(command: tuple[Any, ...]) -> None:
    assert pack(command) == b"".join(Connection().pack_command(*command))


def test_text_that_is_no_utf_8_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        pack(("SET", "k", "\ud800"))


def test_a_posted_command_that_is_refused(server: Server, client: redis.Redis) -> None:
    """Also by a server that is full, which is another kind of error; answers stay in step."""
    failed: list[str] = []
    wire = Wire(client.connection_pool)
    client.config_set("maxmemory", 1)
    try:
        wire.post("SET", "k", "x", on_error=lambda: failed.append("full"))
        wire.post("EVALSHA", "a" * 40, 0, on_error=lambda: failed.append("no script"))
        assert wire("ECHO", "in step") == b"in step"
        assert failed == ["full", "no script"]
        wire.post("SET", "k", "x", on_error=lambda: failed.append("again"))
        wire.settle()
        assert failed[2:] == ["again"]
    finally:
        client.config_set("maxmemory", 0)


def test_a_refusal_while_another_command_is_on_its_way(client: redis.Redis) -> None:
    failed: list[str] = []
    wire = Wire(client.connection_pool)
    with wire._held():
        wire.post("EVALSHA", "a" * 40, 0, on_error=lambda: failed.append("no script"))
    assert failed == ["no script"]
