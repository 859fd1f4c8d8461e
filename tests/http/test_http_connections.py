"""Connections to receivers are kept for the next callbacks: few, and not for long."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier
from time import sleep
from typing import Any

import pytest

from celery_ext.http.callbacks import connections
from celery_ext.http.callbacks import post as module
from celery_ext.http.callbacks.connections import Idle
from celery_ext.http.callbacks.post import Answer, CallbackFailed, post
from celery_ext.http.callbacks.ssrf_guard import split
from tests.kit.jobs import run_jobs
from tests.kit.receiver import Receiver, receiving
from tests.kit.servers import Server


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    idle = Idle()
    monkeypatch.setattr(module, "idle", idle)
    with receiving(keeps=True) as found:
        yield found
    for each in idle._idle:
        each.close()


def call(receiver: Receiver, path: str = "/", *, by_status: bool = False, port: int = 0) -> Answer:
    target = split(receiver.url(path))
    there = [(socket.AF_INET, ("127.0.0.1", port or receiver.port))]
    given: dict[str, Any] = {"seconds": 10, "limit_bytes": 99, "by_status": by_status}
    return post(target, there, b"{}", {}, **given)


@pytest.mark.parametrize("by_status", [False, True])
def test_callbacks_one_after_another_share_a_connection(
    receiver: Receiver, by_status: bool
) -> None:
    for n in range(20):
        assert call(receiver, f"/{n}", by_status=by_status).code == 100
    assert (len(receiver.got), receiver.connections) == (20, 1)


def test_callbacks_at_once_have_their_own(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "OF_EACH", 2)
    together = Barrier(4)

    def answer(handler: Any) -> None:
        together.wait(30)
        handler.send_response(204)
        handler.end_headers()

    receiver.answers["/"] = answer
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            each = [pool.submit(call, receiver, by_status=True) for _ in range(4)]
            assert {one.result().code for one in each} == {100}
    assert receiver.connections == 6  # two of the first four were kept


@pytest.mark.parametrize("ends", ["closed", "closed on the next", "too old", "elsewhere"])
def test_a_connection_that_cannot_be_used_again(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    def close(handler: Any) -> None:
        handler.send_response(204)
        handler.end_headers()
        handler.close_connection = True

    def close_the_next(handler: Any) -> None:
        handler.send_response(204)
        handler.end_headers()
        handler.wfile.flush()
        handler.rfile.readline()
        handler.close_connection = True

    if ends.startswith("closed"):
        receiver.answers["/first"] = close if ends == "closed" else close_the_next
    if ends == "too old":
        monkeypatch.setattr(connections, "IDLE_SECONDS", -1)
    call(receiver, "/first", by_status=True)
    if ends == "elsewhere":
        with receiving(keeps=True) as other:
            assert call(receiver, "/second", port=other.port).code == 100
            assert (other.connections, receiver.connections) == (1, 1)
        return
    assert call(receiver, "/second").code == 100
    assert receiver.connections == 2
    assert [path for path, _, _ in receiver.got].count("/second") == 1


def test_an_answer_that_is_not_read_to_its_end(receiver: Receiver) -> None:
    receiver.answers["/long"] = 200, b"x" * 100_000, {}
    for _ in range(2):
        assert call(receiver, "/long", by_status=True).code == 100
    assert receiver.connections == 2
    with pytest.raises(CallbackFailed, match="longer than 99 bytes"):
        call(receiver, "/long")
    assert call(receiver).code == 100
    assert receiver.connections == 4


@pytest.mark.parametrize("status", [100, 102, 103])
def test_the_final_answer_counts(receiver: Receiver, status: int) -> None:
    """An interim answer counted as the answer, and the final one as that of the next job."""

    def hint_first(handler: Any) -> None:
        hint = f"HTTP/1.1 {status} Wait\r\nLink: </style.css>\r\n\r\n"
        handler.wfile.write(2 * hint.encode())
        handler.wfile.flush()
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    receiver.answers["/hint"] = hint_first
    receiver.answers["/bad"] = (500, b"", {})
    for _ in range(2):
        assert call(receiver, "/hint", by_status=True).code == 100
        with pytest.raises(CallbackFailed, match="status 500"):
            call(receiver, "/bad", by_status=True)
    assert receiver.connections == 1


def test_a_connection_with_another_protocol_is_not_kept(receiver: Receiver) -> None:
    receiver.answers["/switch"] = lambda handler: handler.wfile.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: other\r\n\r\n"
    )
    with pytest.raises(CallbackFailed, match="status 101"):
        call(receiver, "/switch", by_status=True)
    assert call(receiver).code == 100
    assert receiver.connections == 2


def test_a_body_that_hangs_is_no_failure_where_the_status_counts(receiver: Receiver) -> None:
    def hang(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "5")
        handler.end_headers()
        handler.wfile.flush()
        handler.rfile.read(1)  # until the connection is closed

    receiver.answers["/hang"] = hang
    assert call(receiver, "/hang", by_status=True).code == 100


def test_a_body_that_drips_is_not_waited_for(receiver: Receiver) -> None:
    """Each byte began the time for the rest anew, and a slot was taken until the timeout."""

    def drip(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "40")
        handler.end_headers()
        with suppress(OSError):  # the connection is closed
            for _ in range(40):
                handler.wfile.write(b"x")
                sleep(module.LITTLE_SECONDS / 10)

    receiver.answers["/drip"] = drip
    assert call(receiver, "/drip", by_status=True).code == 100
    assert call(receiver).code == 100
    assert receiver.connections == 2


def test_a_fork_has_its_own(receiver: Receiver) -> None:
    call(receiver)
    if (child := os.fork()) == 0:
        os._exit(0 if call(receiver).code == 100 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert receiver.connections == 2
    call(receiver)
    assert receiver.connections == 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("pool", "most"), [("prefork", 2), ("threads", 2), ("gevent", 2), ("solo", 1)]
)
def test_a_worker_keeps_them(server: Server, tmp_path: Path, pool: str, most: int) -> None:
    with run_jobs(server, tmp_path, pool, 2, keeps=True, callback_share=1.0) as jobs:
        sent = [jobs.send("/") for _ in range(30)]
        for id in sent:
            jobs.wait(id, "done")
        assert len(jobs.receiver.got) == 30
        assert 1 <= jobs.receiver.connections <= most
