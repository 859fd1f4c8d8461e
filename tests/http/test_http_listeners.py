"""Many clients listen to lifecycle events at once."""

from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from celery_ext import Delayed
from celery_ext.http import Api, HttpOptions
from celery_ext.http.service import feed
from celery_ext.http.serving.server import OTHER_FILES, make_server
from kombu_delayed.inspection import events as streams
from tests.kit.http import Serve
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough

MAIL = {"task": "till.send_mail", "queue": "mail", "delay": "1h"}


@contextmanager
def listening(api: httpx.Client, query: str = "") -> Iterator[socket.socket]:
    """A stream whose first line has arrived."""
    address = api.base_url.host, api.base_url.port or 80
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(f"GET /v1/events?{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        read_until(client, b": events follow")
        yield client


def read_to_the_end(client: socket.socket) -> None:
    read_until(client, b"0\r\n\r\n")  # the last chunk


def read_until(client: socket.socket, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        part = client.recv(65536)
        assert part, seen
        seen += part
    return seen


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_500_listeners(serve: Serve, many_files: None) -> None:
    api = serve(callbacks=False)
    with ExitStack() as stack:
        clients = [stack.enter_context(listening(api)) for _ in range(500)]
        for n in range(20):
            assert api.post("/v1/tasks", json={**MAIL, "id": f"t{n}"}).status_code == 201
            assert api.get(f"/v1/tasks/t{n}").json()["status"] == "scheduled"
        for client in clients:
            assert read_until(client, b'"id": "t19"').count(b"event: scheduled") == 20
    service = api.api.service  # type: ignore[attr-defined]
    wait_until(lambda: service.feed._thread is None, "nobody is listened to any more")


def test_a_server_may_open_as_many_files_as_its_options_need(delayed: Delayed) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 100 + 200 + 300 + OTHER_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        options = HttpOptions(streams=100, polls=200, waiting=300)
        api = Api(delayed.app, options, needs_token=False)
        server = make_server(api, "127.0.0.1", 0)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == wanted
        assert server.config.limit_concurrency == wanted - OTHER_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_burst_is_read_without_waiting(
    serve: Serve, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No event is lost if a queue has more events in a moment than one read returns."""
    monkeypatch.setattr(feed, "LOOK_SIZE", 5)
    waits: list[float] = []
    api = serve(callbacks=False)
    service = api.api.service  # type: ignore[attr-defined]
    wait = service.feed._ended.wait

    def waiting(seconds: float) -> bool:
        waits.append(seconds)
        return bool(wait(seconds))

    monkeypatch.setattr(service.feed._ended, "wait", waiting)
    with listening(api) as client:
        options = {"countdown": 3600, "queue": "mail"}
        rows = [
            ("till.send_mail", (), {}, None, {**options, "task_id": f"b{n}"}) for n in range(33)
        ]
        delayed.schedule_many(rows, progress=None)
        assert read_until(client, b'"id": "b32"').count(b"event: scheduled") == 33
    assert waits.count(0) >= 6


def test_they_read_together(
    serve: Serve, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    pages = streams.pages
    api = serve()
    delayed.app.send_task("till.charge", countdown=60)
    with ExitStack() as stack:
        clients = [stack.enter_context(listening(api)) for _ in range(20)]
        monkeypatch.setattr(streams, "pages", lambda *given: reads.append(given) or pages(*given))
        delayed.app.send_task("till.charge", task_id="x", countdown=60)
        for client in clients:
            read_until(client, b'"id": "x"')
        positions = [given[2] for given in reads if given[1] == "celery"]
        told = [each for each in positions if each == positions[0]]
    assert len(told) <= 3  # and not once for each


def test_each_gets_what_it_wants(serve: Serve, delayed: Delayed) -> None:
    api = serve()
    with listening(api, "queue=mail") as mail, listening(api, "task_id=b") as b:
        for queue, id in (("mail", "a"), ("pay", "b"), ("mail", "c")):
            assert api.post("/v1/tasks", json={**MAIL, "queue": queue, "id": id}).is_success
        seen = read_until(mail, b'"id": "c"')
        assert (b'"id": "a"' in seen, b'"id": "b"' in seen) == (True, False)
        assert b'"id": "a"' not in read_until(b, b'"id": "b"')


def test_who_reads_too_slowly_is_sent_away(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    api = serve()
    with listening(api) as client:
        monkeypatch.setattr("celery_ext.http.service.feed.MOST_UNREAD", -1)
        api.post("/v1/tasks", json=MAIL)
        read_to_the_end(client)


def test_events_that_nobody_can_read(
    serve: Serve, delayed: Delayed, caplog: pytest.LogCaptureFixture
) -> None:
    api, store = serve(), delayed.store
    delayed.app.send_task("till.charge", countdown=60)
    with caplog.at_level(logging.CRITICAL), listening(api) as client:
        store.run("XADD", store.keys("celery").events, "*", "v", "99")
        read_to_the_end(client)
    store.run("DEL", store.keys("celery").events)
    with listening(api) as client:
        api.post("/v1/tasks", json={**MAIL, "id": "again"})
        read_until(client, b'"id": "again"')
