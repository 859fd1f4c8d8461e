"""Many short-lived queues and connections leave nothing in Redis or in the worker."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import redis
from celery import Celery
from kombu import Connection, Exchange, Queue
from kombu.transport import redis as stock

from tests.kit.inbox import Inbox
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.smoke,
    pytest.mark.skipif(
        not hasattr(stock.Channel, "_maybe_update_queues_expire"), reason="new in Kombu 5.6"
    ),
]

#: Tasks, answers, messages for now, and such as are delayed now and then: 40 messages a queue.
EACH = 10
MEMORY_BYTES = 5_000_000
#: Threads that renew leases may reopen a connection that was just closed, and a worker opens as
#: many connections for answers as its threads need at once.
FEW = 10
ENDS = ("acked", "requeued", "given back", "cancelled")


def descriptors(pid: int) -> int:
    gc.collect()
    return len(os.listdir(f"/proc/{pid}/fd"))


def keys(client: redis.Redis) -> set[bytes]:
    """But those of visits, and bindings, which are Kombu's."""
    each = client.scan_iter("*", count=1_000)
    return {key for key in each if b"_kombu.binding" not in key and b"visit" not in key}


def all_expire(client: redis.Redis) -> None:
    assert [key for key in client.keys("*visit*") if client.pttl(key) == -1] == []
    wait_until(lambda: not client.keys("*visit*"), "all have expired", 120)


def visit(app: Celery, url: str, number: int) -> None:
    """One short-lived connection with a queue of its own, over which a worker answers as well."""
    expires = number % 5 > 0
    options = {"expires": 10} if expires else {"auto_delete": True}
    queue = Queue(f"visit-{number}", Exchange(""), routing_key=f"visit-{number}", **options)
    how = ENDS[number // 5 % 4] if expires else "acked"
    with Connection(url, transport_options={"delayed_lease_seconds": 3}) as connection:
        inbox = Inbox(connection, queue, prefetch_count=10, ack=how == "acked")
        producer = connection.Producer()
        for n in range(EACH):
            app.send_task("add", (n, 1), reply_to=queue.name, connection=connection)
            headers = {"x-delay": 20} if n % 2 and how == "acked" else {}  # else it would wait on
            producer.publish(n, routing_key=queue.name, headers=headers, priority=n % 10)
            producer.publish(n, routing_key=queue.name)
        inbox.receive(3 * EACH if how == "acked" else 1)
        if how == "requeued":
            for message in inbox.messages:
                message.requeue()
        elif how == "cancelled":
            inbox.consumer.cancel()


@pytest.mark.parametrize(
    "queues",
    [60, pytest.param(5_000, marks=pytest.mark.slow)],
)
def test_nothing_stays(queues: int, server: Server, client: redis.Redis, tmp_path: Path) -> None:
    url = f"delayed+{server.url}"
    settings = Settings(url, "rpc://", {"delayed_lease_seconds": 3})
    app = make_app(settings)
    with Worker(settings, tmp_path, pool="threads", concurrency=4) as worker:

        def is_idle() -> bool:
            return client.llen("celery") == 0 and not any(
                client.hlen(key) for key in client.keys("{celery}:unacked:*")
            )

        def run(numbers: range) -> None:
            for number in numbers:
                visit(app, url, number)
            wait_until(is_idle, "the worker has done all", 300)

        run(range(20))
        before, opened = keys(client), (descriptors(worker.pid), descriptors(os.getpid()))
        memory = worker.rss_bytes()
        run(range(20, 20 + queues))
        all_expire(client)
        assert keys(client) == before
        assert abs(worker.rss_bytes() - memory) <= MEMORY_BYTES
        for pid, few in zip((worker.pid, os.getpid()), opened, strict=True):
            assert descriptors(pid) <= few + FEW  # not one for each connection
    app.close()
