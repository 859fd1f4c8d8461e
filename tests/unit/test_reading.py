"""Replies that come in parts are not waited for."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis._parsers import _HiredisParser, _RESP2Parser

from kombu_delayed.connection.connection import ServerConnection
from kombu_delayed.connection.watched import watched

PARSERS = [_RESP2Parser, _HiredisParser]
REPLY = b"*3\r\n$4\r\nwake\r\n$1\r\nq\r\n$1\r\n0\r\n"


@pytest.fixture(params=PARSERS, ids=lambda each: each.__name__)
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Any, socket.socket]]:
    """A connection that would wait for an hour, and the server's end of it."""
    if request.param is _HiredisParser:
        pytest.importorskip("hiredis")
    ours, servers = socket.socketpair()
    ours.settimeout(3600)
    closed: list[Any] = []

    class Connection(watched(redis.Connection, closed.append)):  # type: ignore[misc]
        def _connect(self) -> socket.socket:
            return ours

    connection = Connection(
        parser_class=request.param,
        protocol=2,
        socket_timeout=3600,
        redis_connect_func=lambda new: new._parser.on_connect(new),
    )
    connection.connect()
    connection.closed = closed
    yield connection, servers
    connection.disconnect()
    servers.close()


def test_nothing_has_come(ends: tuple[Any, socket.socket]) -> None:
    connection, _ = ends
    assert not connection.read_ahead()
    assert not connection.false_alarm
    assert not connection.read_ahead(polled=True)
    assert connection.false_alarm


@pytest.mark.parametrize("polled", [False, True])
def test_a_reply_that_comes_byte_by_byte(ends: tuple[Any, socket.socket], polled: bool) -> None:
    connection, server = ends
    for at in range(len(REPLY)):
        assert not connection.read_ahead(polled)
        server.send(REPLY[at : at + 1])
    assert connection.read_ahead(polled)
    assert connection.can_read(timeout=0)
    assert connection.read_response() == [b"wake", b"q", b"0"]
    assert not connection.read_ahead(polled)


def test_replies_stay_in_order(ends: tuple[Any, socket.socket]) -> None:
    connection, server = ends
    server.send(b":1\r\n-ERR wrong\r\n:2\r\n")
    assert connection.read_ahead()
    assert connection.read_ahead()
    assert connection.read_response() == 1
    assert connection.read_ahead()
    with pytest.raises(redis.ResponseError, match="wrong"):
        connection.read_response()
    assert connection.read_response() == 2


def test_the_timeout_of_the_socket_stays(ends: tuple[Any, socket.socket]) -> None:
    connection, server = ends
    server.send(REPLY[:-1])
    assert not connection.read_ahead(polled=True)
    assert connection._sock.gettimeout() == 3600


def test_an_end_is_heard_of_and_told_before_the_socket_is_closed(
    ends: tuple[Any, socket.socket],
) -> None:
    connection, server = ends
    server.close()
    with pytest.raises(redis.ConnectionError):
        connection.read_ahead(polled=True)
    assert connection.closed == []
    connection.disconnect()
    connection.disconnect()
    assert connection.closed == [connection]


def test_a_look_for_answers_does_not_wait_for_the_rest_of_one(
    ends: tuple[Any, socket.socket],
) -> None:
    connection, server = ends
    failed: list[str] = []
    pool = redis.ConnectionPool()
    pool.get_connection = lambda *given: connection  # type: ignore[method-assign]
    wire = ServerConnection(pool)
    wire.post("SET", "a", "b", on_error=lambda: failed.append("a"))
    wire.post("SET", "c", "d", on_error=lambda: failed.append("c"))
    server.send(b"+OK\r\n-ER")
    wire.look()
    assert len(wire._unread) == 1
    server.send(b"R wrong\r\n")
    wire.look()
    assert not wire._unread
    assert failed == ["c"]


def test_a_look_with_nothing_on_its_way_leaves_a_closed_connection_alone(
    ends: tuple[Any, socket.socket],
) -> None:
    """The next send finds out; on a Cluster, opening another connection raises."""
    connection, server = ends
    pool = redis.ConnectionPool()
    pool.get_connection = lambda *given: connection  # type: ignore[method-assign]
    wire = ServerConnection(pool)
    wire.post("SET", "a", "b", on_error=lambda: None)
    server.send(b"+OK\r\n")
    wire.settle()
    server.close()
    wire.look()
    assert connection.closed == []
    wire.hear()
    assert connection.closed == [connection]
    assert not wire.false_alarm
