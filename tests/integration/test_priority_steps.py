"""All ten priorities in order: switched on and off while messages wait, beside workers of four."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis
from kombu import Connection

from tests.kit.inbox import Connect, Inbox
from tests.kit.mail import MAIL
from tests.kit.servers import Server
from tests.kit.wait import wait_until

TEN = {"priority_steps": list(range(10))}
SHUFFLED = (7, 2, 9, 0, 4, 1, 8, 3, 6, 5)
#: The lists that readers of four steps use.
BUCKETS = [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]


@pytest.fixture(params=["", "|"], ids=["", "own separator"])
def sep(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"sep": request.param} if request.param else {}


def publish(connection: Connection, priorities: Iterable[int], seconds: float = 0) -> None:
    producer = connection.Producer()
    eta = (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()
    for priority in priorities:
        producer.publish(
            priority,
            exchange=MAIL.exchange,
            routing_key="mail",
            declare=[MAIL],
            priority=priority,
            headers={"eta": eta} if seconds else {},
        )


def wait_until_due(connection: Connection, count: int) -> None:
    store = connection.default_channel.store
    wait_until(lambda: store.size("mail").due == count, f"{count} are due")


@pytest.mark.parametrize("seconds", [0, 0.3], ids=["ready", "delayed"])
def test_switched_on_while_messages_wait(
    connect: Connect, sep: dict[str, Any], seconds: float
) -> None:
    old, new = connect(**sep), connect(**TEN, **sep)
    publish(old, SHUFFLED, seconds)
    if seconds:
        wait_until_due(old, 10)
    found = Inbox(new, MAIL, prefetch_count=1).receive(10)
    assert [BUCKETS[each] for each in found] == BUCKETS
    publish(new, SHUFFLED, seconds)
    if seconds:
        wait_until_due(new, 10)
    assert Inbox(new, MAIL, prefetch_count=1).receive(10) == list(range(10))


def test_switched_off_while_messages_are_delayed(connect: Connect, sep: dict[str, Any]) -> None:
    """A consumer that makes a message ready puts it into a list that it reads itself."""
    new, old = connect(**TEN, **sep), connect(**sep)
    publish(new, SHUFFLED, seconds=0.3)
    wait_until_due(new, 10)
    found = Inbox(old, MAIL, prefetch_count=1).receive(10)
    assert [BUCKETS[each] for each in found] == BUCKETS


def test_switched_off_while_messages_are_ready(connect: Connect, sep: dict[str, Any]) -> None:
    """Readers of four steps leave the other six lists to a reader of ten."""
    new, old = connect(**TEN, **sep), connect(**sep)
    publish(new, SHUFFLED)
    inbox = Inbox(old, MAIL)
    assert inbox.receive(4) == [0, 3, 6, 9]
    wait_until(lambda: old.default_channel.store.size("mail").ready == 0, "it has taken its lists")
    assert Inbox(new, MAIL).receive(6) == [1, 2, 4, 5, 7, 8]


def test_stock_beside_ten(connect: Connect, server: Server, client: redis.Redis) -> None:
    with Connection(server.url) as stock:
        publish(stock, SHUFFLED)
        new = connect(**TEN)
        assert len(Inbox(new, MAIL, prefetch_count=1).receive(10)) == 10
        publish(new, SHUFFLED)
        assert Inbox(stock, MAIL).receive(4) == [0, 3, 6, 9]
    assert sum(client.llen(f"mail\x06\x16{n}") for n in range(1, 10)) == 6
    assert Inbox(new, MAIL).receive(6) == [1, 2, 4, 5, 7, 8]
