"""Acks are not waited for: one that the server refuses, or never receives, is soon sent again."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
import redis

from kombu_delayed.connection import connection as connection_module
from kombu_delayed.consumer import part as part_module
from kombu_delayed.consumer import unacked as unacked_module
from kombu_delayed.consumer.retrying import ACK_RETRY_SECONDS, LONGEST_RETRY_SECONDS
from tests.crash.deaths import unacked
from tests.crash.dying import Reader, dying_store
from tests.kit.harms import close_connections, cut_power, lose_scripts
from tests.kit.servers import Server
from tests.kit.state import entry
from tests.kit.wait import wait_until

pytestmark = [pytest.mark.crash, pytest.mark.usefixtures("no_keeper")]

NOW_MS = 1_000_000


def reader_of(client: redis.Redis) -> Reader:
    """It holds three messages and has acked a fourth; it claims no more."""
    store = dying_store(client, NOW_MS)
    store.event_limit = 100
    reader = Reader(store)
    store.publish("q", [entry(id) for id in "abcd"])
    reader.read()
    reader.qos.ack(reader.take())
    reader.consumer.step()
    reader.consumer.sources["q"].poll_at = float("inf")
    return reader


def held(server: Server, reader: Reader) -> str:
    with server.client() as client:
        return "".join(sorted(unacked(client, reader.consumer.lease.consumer)))


def come_back(reader: Reader, done: Callable[[], bool]) -> None:
    """Step when the consumer asks for it, and no sooner; it must never stay away for long."""
    at = reader.consumer.step()

    def turn() -> bool:
        nonlocal at
        if not done() and monotonic() >= at:
            at = reader.consumer.step()
        assert done() or at <= monotonic() + ACK_RETRY_SECONDS
        return done()

    wait_until(turn, "the ack has come")


@pytest.mark.parametrize("harm", [lose_scripts, close_connections, cut_power])
@pytest.mark.parametrize("idle_seconds", [0, 60])
def test_it_is_sent_again_though_nothing_else_is_said(
    harm: Callable[[Server], None],
    idle_seconds: float,
    own_server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether or not the connection is checked before the ack is sent."""
    with own_server.client() as client:
        reader = reader_of(client)
        assert held(own_server, reader) == "bcd"
        monkeypatch.setattr(connection_module, "IDLE_SECONDS", idle_seconds)
        monkeypatch.setattr(reader.consumer.store, "deliver", _must_not_claim)
        harm(own_server)
        reader.qos.ack(reader.take())
        come_back(reader, lambda: held(own_server, reader) == "cd")


def test_it_goes_with_the_claim_that_follows(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packet costs the worker and the server more than its contents."""
    with own_server.client() as client:
        reader = reader_of(client)
        consumer = reader.consumer
        consumer.store.publish("q", [entry("e")])
        packets, write = [], redis.Connection.send_packed_command

        def written(self: redis.Connection, packed: Any, **options: Any) -> None:
            packets.append(packed)
            write(self, packed, **options)

        monkeypatch.setattr(redis.Connection, "send_packed_command", written)
        reader.qos.ack(reader.take())
        consumer.sources["q"].ready = True
        consumer.step()
        assert len(packets) == 1
        assert held(own_server, reader) == "cde"
        packets.clear()
        reader.qos.ack(reader.take())
        consumer.step()
        assert len(packets) == 1
        consumer.store.run.settle()
        assert held(own_server, reader) == "de"


@pytest.mark.parametrize("with_slots", [False, True])
def test_it_waits_for_a_claim_that_waits_for_more_room(
    with_slots: bool, own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits no longer than that."""
    with own_server.client() as client:
        reader = waiting_reader(client, monkeypatch, with_slots)
        assert reader.consumer.step() <= monotonic() + 60
        reader.consumer.store.run.settle()
        assert len(unacked(client, reader.consumer.lease.consumer)) == 8
        reader.qos.ack(reader.take())
        monkeypatch.setattr(unacked_module, "SMALL_CLAIM_SECONDS", 0)
        reader.consumer.step()
        assert len(unacked(client, reader.consumer.lease.consumer)) == 8
        reader.consumer.store.run.settle()


@pytest.mark.parametrize("others_wait", [False, True])
def test_slots_wait_no_longer(
    others_wait: bool, own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at all if the last claim found less than it wanted: limits may be the cause."""
    with own_server.client() as client:
        reader = waiting_reader(client, monkeypatch, with_slots=True)
        if others_wait:
            reader.consumer.parts[0].claims.gates.was_short = True
        else:
            reader.qos.outbox.free_at = 0
        reader.consumer.step()
        reader.consumer.store.run.settle()
        assert len(unacked(client, reader.consumer.lease.consumer)) == 7
        assert not reader.qos.outbox.has_any


def waiting_reader(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, with_slots: bool
) -> Reader:
    """Holds eight messages of which it acks one; it claims more when it has room for more."""
    reader = Reader(dying_store(client, NOW_MS), prefetch_count=8)
    reader.consumer.store.publish("q", [entry(f"e{n}") for n in range(20)])
    reader.read()
    monkeypatch.setattr(unacked_module, "SMALL_CLAIM_SECONDS", 60)
    reader.qos.ack(reader.take())
    if with_slots:
        reader.qos.outbox.free("q", 1)
        reader.qos.outbox.free_at = monotonic() + 30
    return reader


def test_it_is_known_before_a_task_may_block(own_server: Server) -> None:
    """The thread of a task that blocks could not learn of a refused ack until the task ends."""
    with own_server.client() as client:
        reader = reader_of(client)
        consumer, seen = reader.consumer, []
        session = consumer.session
        session.hand_over = lambda payload, queue: seen.append(held(own_server, reader))
        session.quick_runs = 0
        consumer.store.publish("q", [entry("e")])
        consumer.sources["q"].ready = True
        consumer.step()
        lose_scripts(own_server)
        reader.qos.ack(reader.take())
        consumer.step()
        assert held(own_server, reader) == "bcde"
        assert consumer.hand_out()
        assert seen == ["cde"]


def test_one_long_task_among_quick_ones(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose tasks run in its own thread: it must be prepared for the next long one."""
    with own_server.client() as client:
        reader = reader_of(client)
        consumer, prepared, found = reader.consumer, [], []
        consumer.store.publish("q", [entry(f"e{n}") for n in range(60)])
        consumer.session.hand_over = lambda payload, queue: None
        consumer.session.quick_runs, consumer.sources["q"].ready = 0, True
        consumer.step()
        monkeypatch.setattr(reader.qos.outbox, "settle", lambda *_: prepared.append(True))
        for blocking_seconds in (*[60] * 5, 0, *[60] * 20):
            monkeypatch.setattr(part_module, "BLOCKING_SECONDS", blocking_seconds)
            prepared.clear()
            assert consumer.hand_out()
            found.append(bool(prepared))
        assert found == [*[True] * 3, False, False, False, *[True] * 20]


def test_it_cuts_a_pause_short(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was away for a while is asked less and less often."""
    with own_server.client() as client:
        reader = reader_of(client)
        consumer = reader.consumer
        with monkeypatch.context() as patch:
            patch.setattr(consumer.store, "deliver", _unreachable)
            patch.setattr(consumer.parts[0].retry, "_seconds", LONGEST_RETRY_SECONDS)
            consumer.sources["q"].ready = True
            late = consumer.step()
            assert consumer.step() == late
            reader.qos.ack(reader.take())
            sooner = LONGEST_RETRY_SECONDS - ACK_RETRY_SECONDS
            assert late - consumer.step() == pytest.approx(sooner)
        come_back(reader, lambda: held(own_server, reader) == "cd")


def _unreachable(*_: Any, **__: Any) -> Any:
    raise redis.exceptions.ConnectionError("gone")


def _must_not_claim(*_: Any, **__: Any) -> Any:
    raise AssertionError("a claim would have read the answer")
