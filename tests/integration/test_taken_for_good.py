"""Tasks of queues without acks, and those that are broadcast to all workers, run everywhere.

Without ack emulation, Kombu sends a message again that is requeued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from tests.kit.inbox import Connect, Inbox
from tests.kit.ledger import Ledger
from tests.kit.mail import MAIL, publish
from tests.kit.routes_app import BROADCAST, NO_ACK, add_queues
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

numbers = count()

QUEUES = ("celery", NO_ACK, BROADCAST)
POOLS = ["prefork", "threads", "solo", "gevent"]


@pytest.fixture
def settings(server: Server, tmp_path: Path) -> Settings:
    return Settings(f"delayed+{server.url}", ledger=str(tmp_path / "ledger"))


@pytest.fixture
def app(settings: Settings) -> Iterator[Celery]:
    with make_app(settings) as app:
        yield add_queues(app)


def send(app: Celery, queue: str, id: str, **options: Any) -> None:
    declared = [app.amqp.queues[queue].exchange]
    app.send_task("record", task_id=id, queue=queue, declare=declared, **options)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("module", ["tests.kit.routes_app", "tests.kit.extended_routes_app"])
def test_all_run(pool: str, module: str, app: Celery, settings: Settings, tmp_path: Path) -> None:
    """Broadcast tasks run on each worker, even with a countdown and while other tasks run."""
    ledger = Ledger(tmp_path / "ledger")
    with ExitStack() as stack:
        for name in ("w1", "w2"):
            options: dict[str, Any] = {"pool": pool, "concurrency": 2, "queues": QUEUES}
            worker = Worker(settings, tmp_path, name=name, module=module, **options)
            stack.enter_context(worker)
        wait_until(lambda: both_listen(app, ledger), "both workers have a broadcast")
        for n in range(10):
            send(app, NO_ACK, f"now{n}")
            send(app, NO_ACK, f"later{n}", countdown=0.5)
            send(app, BROADCAST, f"all{n}")
            send(app, BROADCAST, f"all-later{n}", countdown=0.5)
        ledger.wait(lambda entries: sum(counted(entries).values()) >= 60, "all have run")
    assert counted(ledger.entries()) == {"now": 10, "later": 10, "all": 20, "all-later": 20}


def both_listen(app: Celery, ledger: Ledger) -> bool:
    """A worker misses what is broadcast before it listens, some time after it says it is ready."""
    send(app, BROADCAST, f"probe{next(numbers)}")
    return 2 in ledger.runs().values()


def counted(entries: list[dict[str, Any]]) -> Counter[str]:
    names = (each["id"].rstrip("0123456789") for each in entries)
    return Counter(name for name in names if name != "probe")


@pytest.mark.parametrize("delay_ms", [None, 50])
def test_a_requeued_message_comes_again_without_ack_emulation(
    connect: Connect, client: redis.Redis, delay_ms: int | None
) -> None:
    inbox = Inbox(connect(ack_emulation=False), MAIL, ack=False)
    publish(connect(), "x", delay_ms=delay_ms, message_id="one")
    inbox.receive(1)
    inbox.messages[0].requeue()
    assert inbox.receive(2) == ["x", "x"]
    assert inbox.messages[1].delivery_info["redelivered"]
    assert inbox.messages[1].properties["message_id"] == "one"
    inbox.messages[1].ack()
    inbox.consumer.cancel()
    assert not client.keys("*unacked*")
    assert not client.exists("mail", "{mail}:messages")


def test_recovered_messages_come_again_without_ack_emulation(connect: Connect) -> None:
    connection = connect(ack_emulation=False)
    publish(connection, 1, 2, 3)
    channel = connection.channel()
    first, second = channel.basic_get("mail"), channel.basic_get("mail")
    assert [each.decode() for each in (first, second)] == [1, 2]
    first.ack()
    channel.basic_recover(requeue=True)
    assert [channel.basic_get("mail").decode() for _ in range(2)] == [3, 2]
    assert channel.basic_get("mail") is None
