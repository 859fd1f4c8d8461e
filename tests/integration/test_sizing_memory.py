"""The planned memory beside that of a server."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import redis

from kombu_delayed import sizing
from kombu_delayed.message.envelope import open_kept
from kombu_delayed.store.store import CALL_LIMIT, Entry, Store
from kombu_delayed.transport.server_checks import inspect
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until

COUNT = 20_000


def message_of(server: Server, client: redis.Redis, payload: int) -> tuple[str, str]:
    """Id and text of a task whose arguments have this many bytes as JSON."""
    with make_app(Settings(f"delayed+{server.url}")) as app:
        id = app.send_task("shop.remind", ("x" * (payload - 4),), countdown=3600).id
    kept: Any = client.hget("{celery}:messages", id)
    return id, open_kept(kept).message.decode()


def memory_of_data(client: redis.Redis) -> int:
    """Excludes memory still to be freed, and connections, whose buffers shrink slowly."""

    def found() -> dict[str, Any]:
        return client.info("memory")  # type: ignore[return-value]

    wait_until(lambda: not found()["lazyfree_pending_objects"], "all is freed")
    return int(found()["used_memory_dataset"])


@pytest.mark.parametrize("payload", [100, 1_000])
def test_the_memory_of_many(server: Server, client: redis.Redis, payload: int) -> None:
    template, text = message_of(server, client, payload)
    record_bytes = sizing.record_bytes(payload)
    assert 1 + len(text) == pytest.approx(record_bytes, rel=0.05)
    client.execute_command("FLUSHALL", "SYNC")
    store = Store(client, partition_size=inspect(client).partition_size)
    before = memory_of_data(client)
    for first in range(0, COUNT, CALL_LIMIT):
        ids = [str(uuid.uuid4()) for _ in range(CALL_LIMIT)]
        due_times = (f"+{3_600_000 + (first + n) * 7_919 % COUNT}" for n in range(CALL_LIMIT))
        store.schedule(
            "celery",
            [
                Entry(id, 0, text.replace(template, id), due)
                for id, due in zip(ids, due_times, strict=True)
            ],
        )
    jemalloc = str(client.info("memory")["mem_allocator"]).startswith("jemalloc")
    planned = sizing.message_bytes(record_bytes, jemalloc)
    assert memory_of_data(client) - before == pytest.approx(COUNT * planned, rel=0.15)
