from __future__ import annotations

import math
import select
import threading
from collections.abc import Iterator
from http import HTTPStatus
from time import monotonic
from typing import Any

import pytest
import redis
from redis.connection import Connection

from kombu_delayed.connection.connection import LOOK_SECONDS, Wire, numbers, pack
from kombu_delayed.errors import ServerNotReady
from tests.kit.proxy import Proxy
from tests.kit.servers import Server
from tests.kit.wait import wait_until


@pytest.fixture(params=["with hiredis", "without"])
def packer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr("kombu_delayed.connection.connection._pack_in_c", None)
    else:
        pytest.importorskip("hiredis")


@pytest.mark.usefixtures("packer")
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


@pytest.mark.parametrize("error", [TypeError("no fileno()"), ValueError("Invalid file: None")])
def test_a_connection_that_another_thread_closes_as_it_is_opened(error: Exception) -> None:
    """What redis-py says then is no connection error, and nobody would try again."""

    class Pool(redis.ConnectionPool):
        def get_connection(self, *args: Any, **options: Any) -> Any:
            raise error

    with pytest.raises(redis.exceptions.ConnectionError, match="closed as it was opened"):
        Wire(Pool())("PING")


@pytest.mark.usefixtures("packer")
@pytest.mark.parametrize("command", [("SET", "k", True), ("SET", "k", HTTPStatus.OK)])
def test_parts_of_other_types_are_packed_as_text(command: tuple[Any, ...]) -> None:
    assert pack(command) == pack([str(each) for each in command])


@pytest.mark.usefixtures("packer")
def test_text_that_is_no_utf_8_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        pack(("SET", "k", "\ud800"))


def test_names_that_are_no_text_are_sent_back_as_they_came() -> None:
    name = b"w\xff".decode(errors="surrogateescape")
    assert pack(("HLEN", name, 1, b"\xff")) == pack(("HLEN", b"w\xff", 1, b"\xff"))


@pytest.mark.parametrize(
    ("counts", "expected"), [("{}", []), ("{7}", [7]), ("{1, 0, 12}", [1, 0, 12])]
)
def test_counts_come_as_text(counts: str, expected: list[int], client: redis.Redis) -> None:
    answer = Wire(client.connection_pool)("EVAL", f"return table.concat({counts}, ' ')", 0)
    assert numbers(answer) == expected


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


def test_a_refusal_is_heard_of_without_another_command(client: redis.Redis) -> None:
    failed: list[str] = []
    wire = Wire(client.connection_pool)
    assert wire.look_at == math.inf
    wire.post("EVALSHA", "a" * 40, 0, on_error=lambda: failed.append("no script"))
    wire.post("ECHO", "x", on_error=lambda: failed.append("echo"))
    assert wire.look_at <= monotonic() + LOOK_SECONDS
    wait_until(lambda: wire.look() or wire.look_at == math.inf, "both answers are read")
    assert failed == ["no script"]
    assert wire("ECHO", "in step") == b"in step"


@pytest.fixture
def proxy(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with Proxy(shared_server.port or 0) as proxy:
        yield proxy


def wire_through(proxy: Proxy) -> Wire:
    wire = Wire(redis.ConnectionPool(host="127.0.0.1", port=proxy.port))
    wire("ECHO", "connected")
    return wire


def test_a_look_does_not_wait(proxy: Proxy) -> None:
    failed: list[str] = []
    wire = wire_through(proxy)
    proxy.pause()
    wire.post("ECHO", "x", on_error=lambda: failed.append("echo"))
    wire.look()
    assert monotonic() < wire.look_at + 60 < math.inf
    proxy.resume()
    wait_until(lambda: wire.look() or wire.look_at == math.inf, "the answer is read")
    assert failed == []


def test_a_connection_that_breaks_is_heard_of(proxy: Proxy) -> None:
    failed: list[str] = []
    wire = wire_through(proxy)
    proxy.pause()
    wire.post("ECHO", "x", on_error=lambda: failed.append("echo"))
    proxy.cut()
    wait_until(lambda: wire.look() or failed, "the command has failed")
    assert (failed, wire.look_at) == (["echo"], math.inf)


def test_a_look_beside_a_thread_that_waits_for_its_answer(client: redis.Redis) -> None:
    failed: list[str] = []
    wire = Wire(client.connection_pool)
    wire.post("EVALSHA", "a" * 40, 0, on_error=lambda: failed.append("no script"))
    has_it, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with wire._held():
            has_it.set()
            go_on.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    try:
        assert has_it.wait(60)
        before = monotonic()
        wire.look()
        assert failed == []
        assert wire.look_at >= before + LOOK_SECONDS
    finally:
        go_on.set()
        other.join()
    wire.settle()
    assert failed == ["no script"]


def test_a_pool_that_is_emptied_before_an_answer_was_read(client: redis.Redis) -> None:
    """The next command is not given the answer of another one, and does not wait for ever."""
    failed: list[str] = []
    wire = Wire(client.connection_pool)
    wire.post("ECHO", "x", on_error=lambda: failed.append("echo"))
    client.connection_pool.disconnect()
    assert wire("ECHO", "in step") == b"in step"
    assert failed == ["echo"]
    wire.post("ECHO", "x", on_error=lambda: failed.append("again"))
    client.connection_pool.disconnect()
    wire.look()
    assert failed == ["echo", "again"]


@pytest.mark.parametrize("is_posted", [False, True])
def test_a_pool_that_is_emptied_while_the_connection_is_looked_at(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, is_posted: bool
) -> None:
    """By another thread or greenlet: redis-py goes on with no socket."""
    failed: list[str] = []
    wire = Wire(client.connection_pool)
    assert wire("ECHO", "before") == b"before"
    if is_posted:
        wire.post("SET", "k", "x", on_error=lambda: failed.append("emptied"))

    def emptied(timeout: float) -> bool:
        monkeypatch.undo()
        client.connection_pool.disconnect()
        select.poll().register(wire._connection._sock)
        return True

    monkeypatch.setattr(wire._connection, "can_read", emptied)
    if is_posted:
        wire.look()
    else:
        monkeypatch.setattr(wire, "_used_at", -math.inf)
    assert wire("ECHO", "after") == b"after"
    assert failed == ["emptied"] * is_posted


def test_many_commands_leave_a_server_that_is_not_ready(
    server: Server, client: redis.Redis
) -> None:
    """Behind an address that leads to the master, another connection may lead to the new one."""
    wire = Wire(client.connection_pool)
    assert wire.many([("ECHO", "a"), ("ECHO", "b")]) == [b"a", b"b"]
    before = wire.generation
    with server.client() as admin:
        admin.replicaof("127.0.0.1", 1)
        try:
            answers = wire.many([("SET", "k", "x"), ("SET", "k", "y")])
        finally:
            admin.replicaof("NO", "ONE")
    assert [type(each) for each in answers] == [ServerNotReady, ServerNotReady]
    assert wire.generation == before + 1
