"""Messages that go to another queue or broker at their due time."""

from __future__ import annotations

import socket

import pytest
from kombu import Connection

from celery_ext.policies import HandOver, PolicyError, Timeout, hand_over
from tests.kit.policed import OpenApp, let_time_pass, take
from tests.kit.servers import Server
from tests.kit.wait import wait_until


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_another_broker(open_app: OpenApp, server: Server, compression: str | None) -> None:
    url = f"redis://127.0.0.1:{server.port}/2"
    app = open_app(HandOver(url, queue="elsewhere"))
    result = app.send_task(
        "record", [1, "é"], {"k": 2}, task_id="a", countdown=0.2, priority=6,
        headers={"tenant": "ada"}, compression=compression,
    )  # fmt: skip
    assert app.delayed.get("a") is not None
    wait_until(lambda: take(app) or app.delayed.get("a") is None, "it is handed over")
    with Connection(url) as other:
        queue = other.SimpleQueue("elsewhere")
        message = queue.get(timeout=60)
        assert message.payload[:2] == [[1, "é"], {"k": 2}]
        assert (message.headers["id"], message.headers["task"]) == ("a", "record")
        assert (message.headers["tenant"], message.headers["eta"]) == ("ada", None)
        assert message.properties["priority"] == 6
        message.ack()
        with pytest.raises(queue.Empty):
            queue.get(block=False)
        queue.close()
    dropped = [e.reason for e in app.delayed.events("celery") if e.event == "dropped"]
    assert dropped == ["handed over to queue 'elsewhere'"]
    # The new owner of the task reports its result.
    assert result.state == "PENDING"


def test_the_same_broker(open_app: OpenApp) -> None:
    app = open_app(HandOver(queue="others"))
    app.send_task("record", task_id="a")
    assert take(app) is None
    info = app.delayed.get("a")
    assert (info.queue, info.state) == ("others", "ready")


def test_it_has_waited_for_its_delay(open_app: OpenApp) -> None:
    app = open_app(HandOver(queue="others"))
    app.send_task("record", task_id="a", headers={"x-delay": 3_600_000})
    let_time_pass(app)
    assert take(app) is None
    info = app.delayed.get("a")
    assert (info.queue, info.state) == ("others", "ready")


@pytest.mark.parametrize("seconds", [0.5, 1, 60])
def test_its_expiration_stays(open_app: OpenApp, seconds: float) -> None:
    app = open_app(HandOver(queue="others"))
    app.send_task("record", task_id="a", expiration=seconds)
    assert take(app) is None
    info = app.delayed.get("a")
    assert (info.queue, info.properties["expiration"]) == ("others", str(int(seconds * 1000)))


def test_it_waits_for_a_broker_that_cannot_be_reached(open_app: OpenApp) -> None:
    policy = HandOver("redis://127.0.0.1:1/0", queue="elsewhere")
    app = open_app(policy)
    for id in "abc":
        app.send_task("record", task_id=id)
    assert take(app) is None
    found = [*app.delayed.find()]
    assert {info.id for info in found} == set("abc")
    for info in found:
        assert "cannot be reached" in info.reason
        assert "127.0.0.1:1/0" in info.reason
        assert info.remaining.total_seconds() < 11


@pytest.mark.parametrize("scheme", ["redis", "delayed+redis", "amqp"])
def test_it_does_not_wait_long_for_a_broker_that_says_nothing(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(hand_over, "SILENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}/0"
        app = open_app(HandOver(url, queue="elsewhere"))
        app.send_task("record", task_id="a")
        assert take(app) is None
        assert "cannot be reached" in app.delayed.get("a").reason


def test_what_cannot_be_meant() -> None:
    for given in ({}, {"queue": "a", "exchange": "b"}):
        with pytest.raises(PolicyError, match="either a queue or an exchange"):
            HandOver("amqp://", **given)
    for url in ("ampq://shop:secret@rabbit/", "amqp://shop:se/cret@rabbit/", 5):
        with pytest.raises(PolicyError, match="URL of a broker") as told:
            HandOver(url, queue="a")  # type: ignore[arg-type]
        assert "cret" not in str(told.value)


def test_it_comes_last(open_app: OpenApp) -> None:
    app = open_app(HandOver(queue="others"), Timeout("1h"))
    with pytest.raises(PolicyError, match=r"queue 'celery': HandOver.* comes last"):
        app.send_task("record")
