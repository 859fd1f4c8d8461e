"""A process that was stopped beyond its lease delivers no messages that others have by now."""

from __future__ import annotations

import json

import pytest
import redis

from kombu_delayed.consumer import outbox as outbox_module
from kombu_delayed.errors import LeaseLost
from tests.crash.dying import Reader, dying_store
from tests.kit.state import entry

pytestmark = [pytest.mark.crash, pytest.mark.usefixtures("no_keeper")]

NOW_MS = 1_000_000
LEASE_MS = 30_000


@pytest.fixture
def reader(client: redis.Redis) -> Reader:
    """It has claimed three messages and handed out the first."""
    reader = Reader(dying_store(client, NOW_MS))
    reader.consumer.store.publish("q", [entry(id) for id in "abc"])
    reader.consumer.step()
    assert reader.consumer.hand_out()
    return reader


def stop_for_a_lease(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = reader.consumer.lease
    later = lease.clock() + LEASE_MS / 1000
    monkeypatch.setattr(lease, "clock", lambda: later)
    reader.consumer.store.now = str(NOW_MS + LEASE_MS)


def test_what_it_had_claimed_is_not_delivered(
    reader: Reader, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_for_a_lease(reader, monkeypatch)
    store, name = reader.consumer.store, reader.consumer.lease.consumer
    other = store.deliver("q", "other", 9, 1, lease_ms=LEASE_MS)
    assert other is not None
    assert not other.records
    assert store.leases.renew("q", "other", LEASE_MS) == [name]
    assert store.leases.reclaim("q", name) == 3
    with pytest.raises(LeaseLost):
        reader.consumer.hand_out()
    assert len(reader.got) == 1
    assert not reader.consumer.has_messages
    assert reader.consumer.lease.consumer != name
    assert client.llen("q") == 3


def test_who_gets_single_messages_begins_anew(
    reader: Reader, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_for_a_lease(reader, monkeypatch)
    store, name = reader.consumer.store, reader.consumer.lease.consumer
    assert store.leases.reclaim("q", name) == 3
    client.zrem("{q}:consumers", name)
    with pytest.raises(LeaseLost):
        reader.consumer.get("q", no_ack=False)
    assert reader.consumer.lease.consumer != name
    assert reader.consumer.get("q", no_ack=False)


def test_it_goes_on_while_nobody_has_taken_over(
    reader: Reader, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_for_a_lease(reader, monkeypatch)
    name = reader.consumer.lease.consumer
    reader.read()
    assert len(reader.got) == 3
    assert client.zscore("{q}:consumers", name) == NOW_MS + 2 * LEASE_MS


def test_nothing_is_handed_out_while_it_cannot_ask(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_for_a_lease(reader, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(reader.consumer.store, "together", _unreachable)
        assert not reader.consumer.hand_out()
        assert not reader.consumer.has_messages
    assert len(reader.got) == 1


def test_a_claim_that_is_carried_out_late_overwrites_nothing(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection broke while it was on its way; the consumer has what it claimed afterwards."""
    reader = Reader(dying_store(client, NOW_MS))
    consumer, store = reader.consumer, reader.consumer.store
    with monkeypatch.context() as patch:
        patch.setattr(store, "deliver", _unreachable)
        consumer.step()
    store.publish("q", [entry(id) for id in "abcdef"])
    reader.qos.prefetch_count = 3
    monkeypatch.setattr(consumer.parts[0].retry, "at", 0)
    reader.read()
    name = consumer.lease.consumer
    late = store.deliver("q", name, 3, 1, lease_ms=LEASE_MS)
    assert late is not None
    assert len(late.records) == len(reader.got) == 3
    assert client.hlen(store.keys("q").unacked(name)) == 6


# Messages that were handed out to the program and have not begun.


@pytest.mark.parametrize("limit", [1, 250])
def test_what_waits_goes_back_in_its_order(
    reader: Reader, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(outbox_module, "CALL_LIMIT", limit)
    reader.read()
    tags = [reader.take() for _ in "abc"]
    for tag in tags:
        reader.qos.reserved.add(tag)
    assert reader.qos.reserved.begin(tags[1])
    reader.consumer.remove("q")
    assert [json.loads(text)["body"] for text in client.lrange("q", 0, -1)] == ["c", "a"]
    assert [reader.qos.reserved.begin(tag) for tag in tags] == [False] * 3
    assert reader.qos.queue_of(tags[1]) == "q"


def test_what_was_given_up_is_not_begun(reader: Reader) -> None:
    reader.read()
    acked, requeued, forgotten = (reader.take() for _ in "abc")
    for tag in (acked, requeued, forgotten):
        reader.qos.reserved.add(tag)
    reader.qos.ack(acked)
    reader.qos.reject(requeued, requeue=True)
    assert not any(reader.qos.reserved.begin(tag) for tag in (acked, requeued))
    reader.qos.forget()
    assert not reader.qos.reserved.begin(forgotten)


def test_a_signal_handler_meets_no_lock_of_its_own_thread(reader: Reader) -> None:
    """It may interrupt a flush, or a command, just before that has marked its begin."""
    store, qos = reader.consumer.store, reader.qos
    reader.qos.ack(reader.take())
    for lock in (qos.outbox._flushing, store.run._lock):
        with lock:
            assert lock.acquire(blocking=False)
            lock.release()
            qos.outbox.flush(store, reader.consumer.lease)
    assert not qos.outbox.done


def _unreachable(*command: object, **options: object) -> None:
    raise ConnectionError
