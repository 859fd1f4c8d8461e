"""One queue shared with Kombu's own Redis transport, on either side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection, Exchange, Queue

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.message.envelope import eta_to_ms
from tests.kit.inbox import Connect, Inbox
from tests.kit.ledger import Ledger
from tests.kit.mail import MAIL, in_ms, publish
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

QUICK = {"delayed_poll_seconds": 0.2}


@pytest.fixture(params=["", "shop:"], ids=["no prefix", "prefix"])
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ours(connect: Connect, prefix: str) -> Connection:
    return connect(global_keyprefix=prefix, **QUICK)


@pytest.fixture
def stock(server: Server, prefix: str) -> Any:
    with Connection(server.url, transport_options={"global_keyprefix": prefix}) as connection:
        yield connection


def test_an_eta_message_of_stock_is_parked(stock: Connection, ours: Connection) -> None:
    later = {**in_ms(60_000), "id": "later"}
    publish(stock, "later", headers=later)
    publish(stock, "now")
    publish(stock, "past", headers=in_ms(-400))
    inbox = Inbox(ours, MAIL, prefetch_count=2, ack=False)
    assert inbox.receive(2) == ["now", "past"]
    (parked,) = Backlog(ours.default_channel.store, "mail").get("later")
    assert parked.kept.due_ms == eta_to_ms(later["eta"])
    for message in inbox.messages:
        message.ack()
    inbox.stop_polling()
    falls_due(ours)
    assert inbox.receive(3)[2] == "later"


def falls_due(connection: Connection) -> None:
    backlog = Backlog(connection.default_channel.store, "mail")
    assert backlog.reschedule([Move("later", "+1")]) == [1]


def test_a_no_ack_consumer_parks_as_well(
    stock: Connection, ours: Connection, client: redis.Redis, prefix: str
) -> None:
    publish(stock, "later", headers={**in_ms(60_000), "id": "later"}, priority=9)
    inbox = Inbox(ours, MAIL, no_ack=True)
    assert inbox.drain(0.1) == []
    (parked,) = client.hvals(f"{prefix}{{mail}}:messages")
    assert parked[:1] == b"9", "its priority is kept"
    falls_due(ours)
    assert inbox.receive(1) == ["later"]


def test_a_parked_message_stays_where_it_is_if_the_answer_is_lost(
    stock: Connection, ours: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the connection is back, it seems to be due."""
    publish(stock, "later", headers=in_ms(60_000))
    inbox = Inbox(ours, MAIL)
    channel, moved = ours.default_channel, []
    clock, park = channel.consumer.parts[0].claims.clock, channel.store.park

    def lose(*args: Any) -> None:
        moved.append(park(*args))
        monkeypatch.setattr(channel.store, "park", park)
        monkeypatch.setattr(clock, "now_ms", lambda: eta_to_ms("2999-01-01"))
        raise redis.exceptions.ConnectionError("its answer is lost")

    monkeypatch.setattr(channel.store, "park", lose)
    wait_until(lambda: inbox.drain(0.05) == [] and moved == [1], "it is parked")
    publish(stock, "now")
    assert inbox.receive(1) == ["now"]
    assert channel.store.size("mail").delayed == 1


def test_basic_get_parks_as_well(stock: Connection, ours: Connection) -> None:
    publish(stock, "later", headers=in_ms(60_000))
    publish(stock, "now")
    channel = ours.default_channel
    assert channel.basic_get("mail").decode() == "now"
    assert channel.basic_get("mail") is None
    assert channel.store.size("mail").delayed == 1


def test_ours_to_stock(stock: Connection, ours: Connection) -> None:
    inbox = Inbox(stock, MAIL)
    publish(ours, "later", headers={**in_ms(60_000), "id": "later"})
    publish(ours, *range(3))
    assert inbox.receive(3) == [0, 1, 2]
    helper = Inbox(ours, MAIL, prefetch_count=1, ack=False)
    falls_due(ours)
    helper.receive(1)
    helper.messages[0].requeue()
    helper.consumer.cancel()
    assert inbox.receive(4)[3] == "later"


def order_after(connection: Connection, client: redis.Redis, requeued: list[int]) -> list[Any]:
    """Hold three of five, requeue some of them, and let the close give back the last one."""
    client.flushall()
    publish(connection, *range(5))
    with connection.clone() as other:
        inbox = Inbox(other, MAIL, prefetch_count=3, ack=False)
        inbox.receive(3)
        inbox.consumer.qos(prefetch_count=1)  # it takes no more
        for n in requeued:
            inbox.messages[n].requeue()
    channel = connection.channel()
    found = [channel.basic_get("mail", no_ack=True).decode() for _ in range(5)]
    channel.close()
    return found


@pytest.mark.parametrize(
    ("requeued", "expected"),
    [([0, 1], [2, 3, 4, 0, 1]), ([1, 0], [2, 3, 4, 1, 0]), ([0, 1, 2], [3, 4, 0, 1, 2])],
)
def test_requeue_goes_behind_what_waits_in_its_order(
    requeued: list[int],
    expected: list[int],
    stock: Connection,
    ours: Connection,
    client: redis.Redis,
) -> None:
    for connection in (stock, ours):
        assert order_after(connection, client, requeued) == expected


@pytest.mark.parametrize("consumer", ["stock", "ours"])
def test_priorities_agree(stock: Connection, ours: Connection, consumer: str) -> None:
    for priority in (9, 4, 0, 6, 3):
        publish(stock, f"stock {priority}", priority=priority)
        publish(ours, f"ours {priority}", priority=priority)
    inbox = Inbox({"stock": stock, "ours": ours}[consumer], MAIL, prefetch_count=1)
    received = inbox.receive(10)
    order = [int(body.split()[1]) for body in received]
    assert order == [0, 0, 4, 4, 3, 3, 6, 6, 9, 9]


def test_sizes_agree(stock: Connection, ours: Connection) -> None:
    for n in range(4):
        publish(stock, n, priority=n * 3)
        publish(ours, n, priority=n * 3)
    for connection in (stock, ours):
        assert connection.default_channel._size("mail") == 8
    assert MAIL(stock).purge() == 8
    assert MAIL(ours).purge() == 0


def test_fanout_agrees(stock: Connection, ours: Connection) -> None:
    news = Exchange("news", type="fanout")
    inboxes = [Inbox(stock, Queue("one", news)), Inbox(ours, Queue("two", news))]
    for inbox in inboxes:
        inbox.drain(0.05)
    for connection, body in ((stock, "from stock"), (ours, "from ours")):
        connection.Producer(exchange=news).publish(body)
    for inbox in inboxes:
        assert sorted(inbox.receive(2)) == ["from ours", "from stock"]


@pytest.mark.smoke
def test_a_stock_worker_and_ours_share_a_queue(server: Server, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    options = {"delayed_poll_seconds": 0.2}
    ours = Settings(f"delayed+{server.url}", None, options, str(ledger.path))
    stock = Settings(server.url, None, {}, str(ledger.path))
    apps = [make_app(ours), make_app(stock)]
    with (
        Worker(ours, tmp_path, name="ours", pool="threads", gossip=True),
        Worker(stock, tmp_path, name="stock", pool="threads", gossip=True),
    ):
        ids = []
        for n in range(40):
            countdown = 0.1 * (n % 8) if n % 4 else None
            ids.append(apps[n % 2].send_task("record", countdown=countdown).id)
        entries = ledger.wait_for_all(ids)
        assert {entry["worker"] for entry in entries} == {"ours@test", "stock@test"}
        assert set(ledger.runs().values()) == {1}
        pings = apps[0].control.ping(["ours@test", "stock@test"], timeout=30)
        assert {name for ping in pings for name in ping} == {"ours@test", "stock@test"}
