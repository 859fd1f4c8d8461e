"""Overload, slow and huge requests, a broker that is killed, and a server that stops."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPResponse
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from celery import Celery
from redis.exceptions import RedisError

from celery_ext import Delayed
from celery_ext.http import HttpOptions
from celery_ext.http.api.endpoints.event_stream import Streamed
from celery_ext.http.api.endpoints.lists import search
from celery_ext.http.auth.identity import ANYBODY, Identity
from celery_ext.http.problems import Problem, problem_of
from celery_ext.http.service.threads import Threads
from tests.kit.http import Serve, api_client, bearer, make_app
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.wait import wait_until

MAIL = {"task": "till.send_mail", "delay": "1h"}


def connect(api: httpx.Client) -> socket.socket:
    return socket.create_connection((api.base_url.host, api.base_url.port or 0), timeout=20)


def test_a_slow_head(serve: Serve) -> None:
    api = serve(header_seconds=0.2)
    slow = [connect(api) for _ in range(50)]
    for each in slow:
        each.sendall(b"GET /v1/tasks HTTP/1.1\r\nhost: ")
    assert api.get("/healthz").status_code == 200
    for each in slow:
        with each:
            assert each.recv(1000) == b""


def test_a_connection_that_says_nothing_and_one_that_is_idle(serve: Serve) -> None:
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


def test_a_slow_body(serve: Serve) -> None:
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


def test_a_huge_body_that_waits_to_be_asked_for(api: httpx.Client) -> None:
    with connect(api) as waiting:
        head = b"POST /v1/tasks HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        waiting.sendall(head + b"expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n")
        with waiting.makefile("rb") as answer:
            assert answer.read().startswith(b"HTTP/1.1 413")


def test_more_than_fits(serve: Serve, server: Server) -> None:
    api = serve(rows_waiting=2, threads=1, waiting=1, answer_seconds=20)
    api.post("/v1/tasks", json=MAIL)
    with ThreadPoolExecutor(4) as threads:
        with server.standing_still():
            sent = [threads.submit(api.post, "/v1/tasks", json=MAIL) for _ in range(4)]
            wait_until(lambda: sum(each.done() for each in sent) == 2, "some are refused")
            for each in filter(Future.done, sent):
                refused = each.result()
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert sorted(each.result().status_code for each in sent) == [201, 201, 503, 503]


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Searches block until this is set."""
    go_on, page_of = threading.Event(), search.page_of

    def wait(*given: Any) -> Any:
        assert go_on.wait(60)
        return page_of(*given)

    monkeypatch.setattr(search, "page_of", wait)
    yield go_on
    go_on.set()


def test_searches_of_one_token_leave_threads_to_others(
    serve: Serve, delayed: Delayed, blocked: threading.Event
) -> None:
    api = serve(threads=4, needs_token=True)
    taken = api.api.service.searches.taken  # type: ignore[attr-defined]
    one, other = (bearer(delayed, "admin") for _ in range(2))
    with ThreadPoolExecutor(2) as threads:
        slow = [threads.submit(api.get, "/v1/tasks", headers=one) for _ in range(2)]
        wait_until(lambda: taken.total() == 2, "half of the threads search")
        for refused in (
            api.get("/v1/tasks", headers=one),
            api.post("/v1/bulk/cancel", json={"task": "x", "dry_run": True}, headers=one),
        ):
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert api.get("/v1/tasks/a", headers=one).status_code == 404
        assert api.get("/v1/tasks/a", headers=other).status_code == 404
        blocked.set()
        assert [each.result().status_code for each in slow] == [200, 200]
    assert api.get("/v1/tasks", headers=one).status_code == 200


def test_searches_without_tokens_wait_for_a_thread(serve: Serve, blocked: threading.Event) -> None:
    api = serve(threads=2)
    taken = api.api.service.searches.taken  # type: ignore[attr-defined]
    with ThreadPoolExecutor(3) as threads:
        slow = [threads.submit(api.get, "/v1/tasks") for _ in range(3)]
        wait_until(lambda: taken.total() == 3, "one of them waits")
        blocked.set()
        assert [each.result().status_code for each in slow] == [200, 200, 200]


def test_a_broker_that_does_not_answer(serve: Serve, server: Server) -> None:
    api = serve(answer_seconds=0.3)
    api.post("/v1/tasks", json=MAIL)
    with server.standing_still():
        for answer in (api.post("/v1/tasks", json=MAIL), api.get("/v1/tasks/a")):
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["status"] == 503
    assert wait_until(lambda: api.post("/v1/tasks", json=MAIL).status_code == 201, "it works again")


def test_a_call_that_nobody_waits_for_is_not_made() -> None:
    go_on = threading.Event()
    threads, made = Threads(1, waiting=10, seconds=0.05), list[str]()

    async def run() -> None:
        for blocked, *given in ((go_on.wait,), (made.append, "too late")):
            with pytest.raises(Problem, match="not answered within"):
                await threads.run(blocked, *given)
        go_on.set()
        threads.seconds = 60
        await threads.run(made.append, "needed")

    try:
        asyncio.run(run())
    finally:
        go_on.set()
        threads.close()
    assert made == ["needed"]


def test_the_log_has_the_reason_of_a_broker_that_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class WrongPassword(RedisError):
        pass

    for _ in range(3):
        problem = problem_of(WrongPassword("invalid password"))
        assert (problem.status_code, problem.detail) == (503, "the broker cannot be reached now")
    assert caplog.messages == ["The broker fails: WrongPassword: invalid password"]


def test_a_stream_that_nobody_reads() -> None:
    ended: list[Identity] = []
    options = HttpOptions(body_seconds=0.05)
    service = SimpleNamespace(options=options, streams=SimpleNamespace(end=ended.append))

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


@pytest.mark.parametrize("path", ["/v1/events", "/live/overview"])
def test_a_stream_whose_request_does_not_end(
    serve: Serve, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    api, log = serve(body_seconds=0.1), logging.getLogger("uvicorn.error")
    log.addHandler(caplog.handler)
    with connect(api) as client:
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n\r\n"
        client.sendall(head.encode())
        while client.recv(65536):
            pass
    log.removeHandler(caplog.handler)
    assert not [each for each in caplog.records if each.exc_info]


def test_streams_of_one_token(serve: Serve) -> None:
    service = serve(streams=4).api.service  # type: ignore[attr-defined]
    ada, bob = (Identity(name, frozenset(["read"])) for name in ("ada", "bob"))
    for _ in range(2):
        service.streams.begin(ada)
    with pytest.raises(Problem, match="of this token") as refused:
        service.streams.begin(ada)
    assert (refused.value.status_code, refused.value.headers["Retry-After"]) == (429, "5")
    for _ in range(2):
        service.streams.begin(bob)
    with pytest.raises(Problem, match="too many streams are"):
        service.streams.begin(ANYBODY)
    service.streams.end(ada)
    service.streams.begin(ANYBODY)
    for each in (ada, bob, bob, ANYBODY):
        service.streams.end(each)
    assert not service.streams.taken


@pytest.mark.crash
def test_what_was_accepted_outlives_the_broker(tmp_path: Path) -> None:
    config, kind = {"appendfsync": "always"}, available_kinds()[0]
    accepted: list[str] = []
    other: set[int] = set()
    ended = threading.Event()
    with (
        start_server(kind, tmp_path, port=0, append_only=True, config=config) as server,
        make_app(server.url) as app,
        api_client(app) as api,
        closing(Delayed(app)) as delayed,
    ):

        def post(name: int) -> None:
            for number in count():
                if ended.is_set():
                    return
                id = f"{name}-{number}"
                answer = api.post("/v1/tasks", json={**MAIL, "id": id})
                if answer.status_code == 201:
                    accepted.append(id)
                else:
                    other.add(answer.status_code)

        with ThreadPoolExecutor(8) as threads:
            done = threads.map(post, range(8))
            try:
                for _ in range(3):
                    more = len(accepted) + 100
                    wait_until(lambda more=more: len(accepted) > more, "tasks are accepted", 20)
                    server.kill()
                    server.restart()
            finally:
                ended.set()
            assert len([*done]) == 8
        assert {*accepted} <= {info.id for info in delayed.find()}
        assert other <= {503}


def test_a_server_that_ends_ends_its_streams(delayed: Delayed) -> None:
    with api_client(delayed.app) as api, api.stream("GET", "/v1/events") as stream:
        lines = stream.iter_lines()
        next(lines)
        api.api.service.end_streams()  # type: ignore[attr-defined]
        assert [line for line in lines if line.startswith("id")] in ([], ["id"])


def test_a_request_that_takes_longer_than_a_shutdown(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_ext.http.serving.server.GRACE_SECONDS", 0)
    with ExitStack() as stack:
        with api_client(app) as api:
            slow = stack.enter_context(connect(api))
            head = b"POST /v1/tasks HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            slow.sendall(head + b"expect: 100-continue\r\ncontent-length: 100\r\n\r\n")
            assert slow.recv(10_000).startswith(b"HTTP/1.1 100")  # the server reads the body now
        with slow.makefile("rb") as answer:
            assert answer.read().startswith(b"HTTP/1.1 503")
