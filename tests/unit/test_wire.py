from __future__ import annotations

from typing import Any

import pytest
from redis.connection import Connection

from kombu_delayed.wire import pack


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
