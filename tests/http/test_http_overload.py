"""Overload, slow and huge requests, a broker that is killed, and a server that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from celery_ext import Delayed
from celery_ext.http import HttpOptions
from celery_ext.http.api.endpoints.event_stream import Streamed
from celery_ext.http.auth.identity import ANYBODY, Identity
from celery_ext.http.problems import Problem
from tests.kit.http import api_client, make_app
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.wait import wait_until

MAIL = {"task": "till.send_mail", "delay": "1h"}


@contextmanager
def paused(server: Server) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def connect(api: httpx.Client) -> socket.socket:
    return socket.create_connection((api.base_url.host, api.base_url.port or 0), timeout=20)


def test_a_slow_head(serve: Callable[..., httpx.Client]) -> None:
    api = serve(header_seconds=0.2)
    slow = [connect(api) for _ in range(50)]
    for each in slow:
        each.sendall(b"GET /v1/tasks HTTP/1.1\r\nhost: ")
    assert api.get("/healthz").status_code == 200
    for each in slow:
        with each:
            assert each.recv(1000) == b""


def test_a_connection_that_says_nothing_and_one_that_is_idle(
    serve: Callable[..., httpx.Client],
) -> None:
    api = serve(header_seconds=0.2)
    with connect(api) as silent:
        assert silent.recv(1000) == b""
    with connect(api) as second:
        second.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = HTTPResponse(second)
        answer.begin()
        assert (answer.status, answer.read()) == (200, b"ok\n")
        second.sendall(b"GET /healthz HT")
        assert second.recv(10_000) == b""


def test_a_long_head(api: httpx.Client) -> None:
    with connect(api) as long:
        long.sendall(b"GET / HTTP/1.1\r\n")
        try:
            for _ in range(1_000):
                long.sendall(b"x: " + b"y" * 8_000 + b"\r\n")
            told = long.recv(1_000)
        except ConnectionError:
            told = b""
        assert b"200" not in told
    assert api.get("/healthz").status_code == 200


def test_a_slow_body(serve: Callable[..., httpx.Client]) -> None:
    api = serve(body_seconds=0.2)
    with connect(api) as slow:
        head = b"POST /v1/tasks HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        slow.sendall(head + b"content-length: 100\r\n\r\n{")
        assert slow.recv(10_000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body(api: httpx.Client, delayed: Delayed, chunked: bool) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * (1 << 20)

    length = {} if chunked else {"content-length": str(100 << 20)}
    headers = {"content-type": "application/json", **length}
    answer = api.post("/v1/tasks", content=parts(), headers=headers)
    assert answer.status_code == 413
    assert api.get("/healthz").status_code == 200


def test_more_than_fits(serve: Callable[..., httpx.Client], server: Server) -> None:
    api = serve(rows_waiting=2, threads=1, waiting=1, answer_seconds=20)
    api.post("/v1/tasks", json=MAIL)
    found: list[httpx.Response] = []

    def post() -> None:
        found.append(api.post("/v1/tasks", json=MAIL))

    threads = [threading.Thread(target=post) for _ in range(4)]
    with paused(server):
        for each in threads:
            each.start()
        wait_until(lambda: len(found) >= 2, "some are refused")
        refused = [(each.status_code, each.headers["retry-after"]) for each in found]
        assert set(refused) == {(503, "1")}
    for each in threads:
        each.join(30)
    assert sorted(each.status_code for each in found) == [201, 201, 503, 503]


def test_a_broker_that_does_not_answer(serve: Callable[..., httpx.Client], server: Server) -> None:
    api = serve(answer_seconds=0.3)
    api.post("/v1/tasks", json=MAIL)
    with paused(server):
        for answer in (api.post("/v1/tasks", json=MAIL), api.get("/v1/tasks/a")):
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["status"] == 503
    assert wait_until(lambda: api.post("/v1/tasks", json=MAIL).status_code == 201, "it works again")


def test_a_stream_that_nobody_reads() -> None:
    ended: list[Identity] = []
    options = HttpOptions(body_seconds=0.05)
    service = SimpleNamespace(options=options, stream_ends=ended.append)

    async def lines() -> AsyncIterator[str]:
        while True:
            yield "a line\n"

    async def never(message: Any = None) -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        call: Any = SimpleNamespace(service=service, identity=ANYBODY)
        await asyncio.wait_for(Streamed(call, lines())({"type": "http"}, never, never), 20)

    asyncio.run(run())
    assert ended == [ANYBODY]


def test_streams_of_one_token(serve: Callable[..., httpx.Client]) -> None:
    service = serve(streams=4).api.service  # type: ignore[attr-defined]
    ada, bob = (Identity(name, frozenset(["read"])) for name in ("ada", "bob"))
    for _ in range(2):
        service.stream_begins(ada)
    with pytest.raises(Problem, match="of this token") as refused:
        service.stream_begins(ada)
    assert (refused.value.status_code, refused.value.headers["Retry-After"]) == (429, "5")
    for _ in range(2):
        service.stream_begins(bob)
    with pytest.raises(Problem, match="too many streams are"):
        service.stream_begins(ANYBODY)
    service.stream_ends(ada)
    service.stream_begins(ANYBODY)
    for each in (ada, bob, bob, ANYBODY):
        service.stream_ends(each)
    assert not service._streams


@pytest.mark.crash
def test_what_was_accepted_outlives_the_broker(tmp_path: Path) -> None:
    config = {"appendfsync": "always"}
    accepted: list[str] = []
    other: set[int] = set()
    with (
        start_server(
            available_kinds()[0], tmp_path, port=0, append_only=True, config=config
        ) as server,
        make_app(server.url) as app,
        api_client(app) as api,
    ):
        ended = threading.Event()

        def post(name: int) -> None:
            number = 0
            while not ended.is_set():
                number += 1
                id = f"{name}-{number}"
                answer = api.post("/v1/tasks", json={**MAIL, "id": id})
                if answer.status_code == 201:
                    accepted.append(id)
                else:
                    other.add(answer.status_code)

        threads = [threading.Thread(target=post, args=(n,)) for n in range(8)]
        for each in threads:
            each.start()
        for _ in range(3):
            before = len(accepted)
            wait_until(lambda before=before: len(accepted) > before + 100, "tasks are accepted", 20)
            server.kill()
            server.restart()
        ended.set()
        for each in threads:
            each.join(30)
        delayed = Delayed(app)
        kept = {info.id for info in delayed.find()}
        delayed.close()
        assert not set(accepted) - kept
        assert other <= {503}


def test_a_server_that_ends_answers_what_is_under_way(
    serve: Callable[..., httpx.Client], delayed: Delayed
) -> None:
    with api_client(delayed.app) as api:
        streams = api.stream("GET", "/v1/events")
        stream = streams.__enter__()
        lines = stream.iter_lines()
        next(lines)
        assert api.post("/v1/tasks", json=MAIL).status_code == 201
        api.api.service.end_streams()  # type: ignore[attr-defined]
        assert [line for line in lines if line.startswith("id")] in ([], ["id"])
        streams.__exit__(None, None, None)
    assert len([*delayed.find()]) == 1
