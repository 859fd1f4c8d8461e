from __future__ import annotations

import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError

from tests.kit import wait
from tests.kit.proxy import HOST, Proxy
from tests.kit.servers import available_kinds, start_server
from tests.kit.wait import Stopwatch, wait_until


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(65536):
            self.request.sendall(data)


class EchoServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False


@pytest.fixture
def echo_port() -> Iterator[int]:
    with EchoServer((HOST, 0), Echo) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=5)


def receive(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size and (data := connection.recv(65536)):
        parts += data
    return parts


def seconds_to_echo(connection: socket.socket, data: bytes) -> float:
    start = time.perf_counter()
    connection.sendall(data)
    assert receive(connection, len(data)) == data
    return time.perf_counter() - start


def test_wait_until_names_what_it_waited_for_and_the_last_value() -> None:
    with pytest.raises(
        AssertionError, match=r"^not within 0\.02 s: the moon \(last value: \[\]\)$"
    ):
        wait_until(list, "the moon", timeout_seconds=0.02)


def test_a_stopwatch_leaves_out_the_wait_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = {os.getpid(): 1.0, 1: 2.0}
    monkeypatch.setattr(wait, "starved_seconds", lambda pid: waited.get(pid, 0.0))
    watch = Stopwatch(1)
    waited[1] += 100
    assert -100 <= watch.seconds < 0
    waited.clear()  # they have ended
    assert watch.seconds >= 0


def test_proxy_delays_each_way(echo_port: int) -> None:
    with Proxy(echo_port) as direct, connect(direct.port) as connection:
        assert seconds_to_echo(connection, b"x") < 0.2
    with Proxy(echo_port, delay_seconds=0.15) as slow, connect(slow.port) as connection:
        assert 0.3 <= seconds_to_echo(connection, b"x") < 1


def test_proxy_cut_ends_and_refuses_connections_until_healed(echo_port: int) -> None:
    with Proxy(echo_port) as proxy, connect(proxy.port) as connection:
        seconds_to_echo(connection, b"x")
        proxy.cut()
        assert connection.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            connect(proxy.port)
        proxy.heal()
        with connect(proxy.port) as fresh:
            seconds_to_echo(fresh, b"x")


def test_proxy_pause_holds_bytes_and_connections(echo_port: int) -> None:
    with Proxy(echo_port) as proxy, connect(proxy.port) as connection:
        seconds_to_echo(connection, b"x")
        proxy.pause()
        connection.settimeout(0.1)
        connection.sendall(b"held")
        with connect(proxy.port) as fresh:
            fresh.settimeout(0.1)
            fresh.sendall(b"too")
            for silent in (connection, fresh):
                with pytest.raises(socket.timeout):
                    silent.recv(1)
                silent.settimeout(5)
            proxy.resume()
            assert receive(connection, 4) == b"held"
            assert receive(fresh, 3) == b"too"


@pytest.fixture(params=available_kinds())
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("port", [0, None], ids=["port", "socket"])
def test_server_restarts_where_it_was_with_what_it_had(
    port: int | None, kind: str, tmp_path: Path
) -> None:
    with start_server(kind, tmp_path, port=port, append_only=True) as server:
        url = server.url
        with server.client() as client:
            client.set("key", "kept")
            assert client.info()["process_id"] == server.pid
        server.restart()
        server.kill()
        with server.client(socket_timeout=1) as client, pytest.raises(ConnectionError):
            client.ping()
        server.start()
        with server.client() as client:
            assert client.get("key") == b"kept"
        assert server.url == url


def test_server_keeps_nothing_unless_asked_and_takes_config(kind: str, tmp_path: Path) -> None:
    lines = {"client-output-buffer-limit": "normal 1mb 0 0", "maxmemory": "50mb"}
    with start_server(kind, tmp_path, config=lines) as server, server.client() as client:
        assert client.config_get("maxmemory")["maxmemory"] == "52428800"
        client.set("key", "lost")
        server.restart()
        assert client.get("key") is None


def test_missing_server_skips_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="'redis' is not installed"):
        start_server("redis", tmp_path)
    monkeypatch.setenv("CI", "true")
    with pytest.raises((RuntimeError, pytest.skip.Exception)) as caught:
        start_server("redis", tmp_path)
    assert caught.type is RuntimeError


def test_kinds_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "KOMBU_DELAYED_TEST_SERVERS"
    monkeypatch.delenv(variable, raising=False)
    assert available_kinds() == ("valkey",)
    monkeypatch.setenv(variable, "redis62, redis")
    assert available_kinds() == ("redis62", "redis")
    monkeypatch.setenv(variable, "mysql")
    with pytest.raises(ValueError, match="'mysql': choose from valkey, redis62, redis"):
        available_kinds()
