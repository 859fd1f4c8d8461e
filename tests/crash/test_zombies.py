"""A process that was stopped beyond its lease delivers nothing of what others have by now."""

from __future__ import annotations

import pytest
import redis

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
    assert store.renew("q", "other", LEASE_MS) == [name]
    assert store.reclaim("q", name) == 3
    with pytest.raises(LeaseLost):
        reader.consumer.hand_out()
    assert len(reader.got) == 1
    assert not reader.consumer.has_messages
    assert reader.consumer.lease.consumer != name
    assert client.llen("q") == 3


def test_it_goes_on_while_nobody_has_taken_over(
    reader: Reader, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_for_a_lease(reader, monkeypatch)
    name = reader.consumer.lease.consumer
    reader.read()
    assert len(reader.got) == 3
    assert client.zscore("{q}:consumers", name) == NOW_MS + 2 * LEASE_MS


def test_it_asks_only_when_it_may_have_been_stopped(reader: Reader) -> None:
    sent = reader.consumer.store.run.sent  # type: ignore[attr-defined]
    while reader.consumer.hand_out():
        pass
    assert reader.consumer.store.run.sent == sent  # type: ignore[attr-defined]


def test_nothing_is_handed_out_while_it_cannot_ask(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_for_a_lease(reader, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(reader.consumer.store, "run", _unreachable)
        assert not reader.consumer.hand_out()
        assert not reader.consumer.has_messages
    assert len(reader.got) == 1


def _unreachable(*command: object) -> None:
    raise ConnectionError
