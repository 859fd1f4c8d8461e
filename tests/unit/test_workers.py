"""Which workers ask before a task begins, and for which of their tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.connection import Pipe
from celery import Celery
from celery.concurrency.asynpool import AsynPool
from celery.events import EventDispatcher
from celery.signals import worker_init
from celery.worker.heartbeat import Heart
from kombu.asynchronous import Hub

import celery_ext.cli  # noqa: F401  as Celery's command line does
from celery_ext.worker import bootsteps
from celery_ext.worker.bootsteps import (
    POOLED_REQUEST,
    REQUEST,
    STOCK_REQUEST,
    DeadReasons,
    Events,
    GiveBack,
    OwnRequests,
    RemoteControlLoop,
    Replacing,
)
from celery_ext.worker.own_tasks import OwnTasks
from celery_ext.worker.shutdown.draining import Draining

OURS = {DeadReasons, Events, GiveBack, OwnRequests, OwnTasks, RemoteControlLoop, Replacing}


@dataclass(eq=False)
class Controller:
    app: Celery


@pytest.mark.parametrize(
    ("url", "steps"),
    [
        ("delayed+redis://127.0.0.1:1", OURS),
        (
            "delayed+redis://127.0.0.1:1;delayed+redis://127.0.0.1:2",
            OURS,
        ),
        ("redis://127.0.0.1:1", set()),
        ("memory://", set()),
    ],
)
def test_those_whose_broker_is_ours(url: str, steps: set[type]) -> None:
    with Celery("t", broker=url, set_as_current=False) as app:
        worker_init.send(sender=Controller(app))
        assert app.steps["consumer"] == steps


def abs_of(x: int) -> int:
    return abs(x)


@pytest.mark.parametrize(("queues_in_threads", "own"), [(False, REQUEST), (True, POOLED_REQUEST)])
def test_tasks_with_a_strategy_or_a_request_of_their_own_keep_it(
    queues_in_threads: bool, own: str
) -> None:
    with Celery("t", broker="memory://", set_as_current=False) as app:
        plain = app.task(name="plain", shared=False)(abs_of)
        batched = app.task(name="batched", shared=False, Strategy="batches:Strategy")(abs_of)
        special = app.task(name="special", shared=False, Request="special:Request")(abs_of)
        app.finalize()
        pool = SimpleNamespace(signal_safe=not queues_in_threads, on_apply=None)
        for _ in range(2):
            OwnRequests(SimpleNamespace(app=app, pool=pool, controller=None))
        assert [task.Request for task in (plain, batched, special)] == [
            own,
            STOCK_REQUEST,
            "special:Request",
        ]


@dataclass
class Absent:
    """The producer of a broker that is away; it records whether it was told to retry."""

    insisted: list[bool] = field(default_factory=list)

    def publish(self, event: dict[str, Any], *, retry: bool, **_: Any) -> None:
        self.insisted.append(retry)
        raise OSError("no broker")


def test_nobody_waits_until_the_broker_takes_a_heartbeat() -> None:
    with Celery("t", broker="memory://", set_as_current=False) as app:
        dispatcher = EventDispatcher(app=app, enabled=False)
        dispatcher.enabled, dispatcher.producer = True, Absent()
        parent = SimpleNamespace(event_dispatcher=dispatcher)
        Events(parent).start(parent)
        Heart(SimpleNamespace(), dispatcher)._send("worker-heartbeat")
        assert dispatcher.producer.insisted == [False]
        assert len(dispatcher._outbound_buffer) == 0


class Pool(AsynPool):
    """A pool of one process that exits a few checks after its files were closed."""

    def __init__(self, looks: int) -> None:
        self.process = SimpleNamespace(_sentinel_poll=None)
        self._pool = [self.process]
        self._looks = looks

    def maintain_pool(self) -> None:
        self._looks -= 1
        if self._looks == 0:
            self._pool.clear()


@pytest.mark.parametrize("looks", [1, 2, 5])
def test_a_process_is_replaced_once_it_has_ended(looks: int) -> None:
    hub, pool = Hub(), Pool(looks)
    parent = SimpleNamespace(pool=SimpleNamespace(_pool=pool))
    Replacing(parent).start(parent)
    pool._event_process_exit(hub, pool.process)
    loop = hub.create_loop()
    while hub.timer.queue:
        next(loop)
    hub.close()
    assert pool._pool == []


@pytest.mark.parametrize("is_stopped", [False, True])
def test_remote_control_outlives_a_lost_broker(
    is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker does not reconnect if the transport bridges an outage."""
    monkeypatch.setattr(bootsteps, "RETRY_SECONDS", 0)
    box = SimpleNamespace(_node_shutdown=None)
    begun: list[Event] = []

    def loop(consumer: Any) -> str:
        box._node_shutdown = Event()
        begun.append(box._node_shutdown)
        if len(begun) == 3:
            return "stopped"
        if is_stopped:
            box._node_shutdown.set()
        raise ConnectionError("the server is away")

    consumer = SimpleNamespace(connection_errors=(ConnectionError,), channel_errors=())
    assert bootsteps.listen(box, loop, consumer) == (None if is_stopped else "stopped")
    assert len(begun) == (1 if is_stopped else 3)


def test_workers_with_greenlets_have_a_lasting_remote_control() -> None:
    boxes = {is_green: SimpleNamespace(loop=abs_of) for is_green in (True, False)}
    for is_green, box in boxes.items():
        control = SimpleNamespace(is_green=is_green, box=box)
        steps = {"celery.worker.consumer.control.Control": control}
        RemoteControlLoop(SimpleNamespace(blueprint=SimpleNamespace(steps=steps)))
    assert boxes[False].loop is abs_of
    assert boxes[True].loop.func is bootsteps.listen


# A warm shutdown of a pool of processes.


def test_a_process_that_is_gone_is_not_listened_to() -> None:
    """Celery keeps the descriptor of its closed pipe: the shutdown would be interrupted."""
    reader, writer = Pipe(duplex=False)
    fd = reader.fileno()
    reader.close()
    writer.close()
    process = SimpleNamespace(outq=SimpleNamespace(_reader=reader))
    pool = SimpleNamespace(_fileno_to_outq={fd: process})
    draining = Draining(SimpleNamespace(pool=SimpleNamespace(_pool=pool)))
    assert not draining._hear(0)
