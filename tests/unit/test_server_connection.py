from __future__ import annotations

import math
import select
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
import redis
from redis.connection import Connection

from kombu_delayed.connection import connection as connection_module
from kombu_delayed.connection.commands import pack, read
from kombu_delayed.connection.connection import LOOK_SECONDS, ServerConnection
from kombu_delayed.errors import ServerNotReady
from tests.kit.proxy import Proxy
from tests.kit.servers import Server
from tests.kit.wait import wait_until


@pytest.fixture(params=["with hiredis", "without"])
def packer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr("kombu_delayed.connection.commands._pack_in_c", None)
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
    """The error of redis-py is no connection error, so no caller would retry."""

    class Pool(redis.ConnectionPool):
        def get_connection(self, *args: Any, **options: Any) -> Any:
            raise error

    with pytest.raises(redis.exceptions.ConnectionError, match="closed as it was opened"):
        ServerConnection(Pool())("PING")


def test_names_that_are_no_text_are_sent_back_as_they_came() -> None:
    name = b"w\xff".decode(errors="surrogateescape")
    assert pack(("HLEN", name, 1, b"\xff")) == pack(("HLEN", b"w\xff", 1, b"\xff"))


class Posting(ServerConnection):
    """Keeps the names of the commands that were reported to it as failed."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        super().__init__(pool)
        self.failed: list[str] = []

    def send(self, name: str, *command: Any) -> None:
        self.post(*(command or ("ECHO", "x")), on_error=lambda: self.failed.append(name))

    def has_read_all(self) -> bool:
        self.look()
        return self.look_at == math.inf


@pytest.fixture
def wire(client: redis.Redis) -> Posting:
    return Posting(client.connection_pool)


@pytest.fixture
def proxy(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with Proxy(shared_server.port or 0) as proxy:
        yield proxy


NO_SCRIPT = ("EVALSHA", "a" * 40, 0)


def test_a_posted_command_that_is_refused(wire: Posting, client: redis.Redis) -> None:
    """A full server refuses with another kind of error; answers still match their commands."""
    client.config_set("maxmemory", 1)
    try:
        wire.send("full", "SET", "k", "x")
        wire.send("no script", *NO_SCRIPT)
        assert wire("ECHO", "in step") == b"in step"
        assert wire.failed == ["full", "no script"]
        wire.send("again", "SET", "k", "x")
        wire.settle()
        assert wire.failed[2:] == ["again"]
    finally:
        client.config_set("maxmemory", 0)


def test_a_refusal_is_heard_of_without_another_command(wire: Posting) -> None:
    assert wire.look_at == math.inf
    wire.send("no script", *NO_SCRIPT)
    wire.send("echo")
    assert wire.look_at <= monotonic() + LOOK_SECONDS
    wait_until(wire.has_read_all, "both answers are read")
    assert wire.failed == ["no script"]
    assert wire("ECHO", "in step") == b"in step"


def wire_through(proxy: Proxy) -> Posting:
    wire = Posting(redis.ConnectionPool(host="127.0.0.1", port=proxy.port))
    wire("ECHO", "connected")
    return wire


def test_a_connection_that_breaks_is_heard_of(proxy: Proxy) -> None:
    wire = wire_through(proxy)
    proxy.pause()
    wire.send("echo")
    proxy.cut()
    wait_until(wire.has_read_all, "the command has failed")
    assert wire.failed == ["echo"]


def test_a_look_beside_a_thread_that_waits_for_its_answer(wire: Posting) -> None:
    wire.send("no script", *NO_SCRIPT)
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
        assert wire.failed == []
        assert wire.look_at >= before + LOOK_SECONDS
    finally:
        go_on.set()
        other.join()
    wire.settle()
    assert wire.failed == ["no script"]


def test_a_pool_that_is_emptied_before_an_answer_was_read(
    wire: Posting, client: redis.Redis
) -> None:
    """The next command neither gets the answer of another one nor waits for ever."""
    wire.send("echo")
    client.connection_pool.disconnect()
    assert wire("ECHO", "in step") == b"in step"
    assert wire.failed == ["echo"]
    wire.send("again")
    client.connection_pool.disconnect()
    wire.look()
    assert wire.failed == ["echo", "again"]


@pytest.mark.parametrize("is_posted", [False, True])
def test_a_pool_that_is_emptied_while_the_connection_is_looked_at(
    wire: Posting, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, is_posted: bool
) -> None:
    """Another thread or greenlet empties it: redis-py continues without a socket."""
    assert wire("ECHO", "before") == b"before"
    if is_posted:
        wire.send("emptied", "SET", "k", "x")

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
    assert wire.failed == ["emptied"] * is_posted


def test_many_commands_leave_a_server_that_is_not_ready(
    server: Server, client: redis.Redis
) -> None:
    """A new connection to the same address may lead to the new master."""
    wire = ServerConnection(client.connection_pool)
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


@pytest.fixture
def packets(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The data written to sockets, one entry for each write."""
    found: list[bytes] = []
    plain = Connection.send_packed_command

    def send(self: Connection, packed: list[bytes], **options: Any) -> None:
        found.extend(packed)
        plain(self, packed, **options)

    monkeypatch.setattr(Connection, "send_packed_command", send)
    return found


def test_what_is_held_back_goes_with_the_next_command(wire: Posting, packets: list[bytes]) -> None:
    wire("ECHO", "connected")
    packets.clear()
    wire.hold_back()
    wire.send("no script", *NO_SCRIPT)
    wire.send("echo")
    assert packets == []
    assert wire("ECHO", "in step") == b"in step"
    assert packets == [b"".join(map(pack, [NO_SCRIPT, ("ECHO", "x"), ("ECHO", "in step")]))]
    assert wire.failed == ["no script"]
    wire.push()
    assert len(packets) == 1
    wire.send("echo")
    assert packets[1:] == [pack(("ECHO", "x"))]
    wire.settle()


@pytest.mark.parametrize("way", ["push", "settle", "lend"])
def test_what_is_held_back_is_not_forgotten(
    wire: Posting, client: redis.Redis, way: str, packets: list[bytes]
) -> None:
    wire.hold_back()
    wire.send("set", "SET", "k", "x")
    assert pack(("SET", "k", "x")) not in packets
    getattr(wire, way)()
    assert packets.count(pack(("SET", "k", "x"))) == 1
    wait_until(lambda: client.get("k") == b"x", "it has come")
    wire.settle()
    assert wire.failed == []


def test_a_connection_that_breaks_before_what_is_held_back_is_sent(proxy: Proxy) -> None:
    wire = wire_through(proxy)
    wire.hold_back()
    wire.send("set", "SET", "k", "x")
    proxy.cut()
    with pytest.raises(redis.exceptions.ConnectionError):
        wire("ECHO", "broken")
    assert wire.failed == ["set"]
    wire.push()
    assert wire.failed == ["set"]


def test_what_interrupts_a_signal_handler_leaves_no_answer_for_others(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection it borrowed goes back to its pool without the pending answer."""

    class Interrupt(BaseException):
        pass

    def raise_late(*args: Any) -> Any:
        raise Interrupt

    pool = redis.ConnectionPool.from_url(server.url)
    connection = ServerConnection(pool)
    with connection._held():  # as where a signal handler has interrupted a command
        with monkeypatch.context() as patch:
            patch.setattr("kombu_delayed.connection.connection.read_both", raise_late)
            with pytest.raises(Interrupt):
                # The server answers when the next one has been sent.
                connection("EVAL", "for i = 1, 3000000 do end return 'late'", 0)
        with monkeypatch.context() as patch:
            # Otherwise the late answer, if it has arrived, would be noticed.
            patch.setattr(Connection, "can_read", lambda *_, **__: False)
            assert connection("ECHO", "mine") == b"mine"
    pool.disconnect()


@pytest.mark.parametrize("is_consumers", [False, True])
def test_only_the_signal_handler_of_a_consumer_waits_for_what_it_interrupts(
    server: Server, monkeypatch: pytest.MonkeyPatch, is_consumers: bool
) -> None:
    """That of a sender would wait in vain if the interrupted thread had just read the answer."""
    connection = ServerConnection(redis.ConnectionPool.from_url(server.url))
    connection.is_consumers = is_consumers
    waits: list[Any] = []
    monkeypatch.setattr(connection_module, "wait_readable", lambda *given: waits.append(given))

    def read_interrupted(of: Any) -> Any:
        answer = read(of)
        assert connection("ECHO", "aside") == b"aside"
        return answer

    monkeypatch.setattr(connection_module, "read", read_interrupted)
    assert connection("ECHO", "interrupted") == b"interrupted"
    assert len(waits) == is_consumers
    connection.pool.disconnect()


def test_an_idle_connection_is_not_used_if_another_one_got_no_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network may have swallowed it as well, and then it would time out in its turn."""
    monkeypatch.setattr(connection_module, "IDLE_SECONDS", -1)
    pool = redis.ConnectionPool.from_url(server.url)
    held, lent = ServerConnection(pool), ServerConnection(pool)
    before = held("CLIENT", "ID"), lent("CLIENT", "ID")
    lent.lend()
    other = redis.ConnectionPool.from_url(server.url, socket_timeout=0.05)
    broken = ServerConnection(other)
    assert broken("PING") == b"PONG"
    with server.standing_still(), pytest.raises(redis.exceptions.TimeoutError):
        broken("PING")
    after = held("CLIENT", "ID"), lent("CLIENT", "ID")
    assert not {*before} & {*after}
    assert (held("CLIENT", "ID"), lent("CLIENT", "ID")) == after
    pool.disconnect()
    other.disconnect()


def test_one_that_was_used_since_stays(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "IDLE_SECONDS", -1)
    pool, other = (redis.ConnectionPool.from_url(server.url) for _ in range(2))
    used, broken = ServerConnection(pool), ServerConnection(other)
    broken.post("PING", on_error=lambda: None)
    before = used("CLIENT", "ID")
    broken._connection.disconnect()
    with pytest.raises(redis.exceptions.ConnectionError):
        broken.settle()
    assert used("CLIENT", "ID") == before
    pool.disconnect()
    other.disconnect()
