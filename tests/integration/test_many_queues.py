"""A consumer of hundreds of queues sends its commands to the server together."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import pytest
import redis
from kombu import Connection
from kombu.utils.scheduling import priority_cycle
from redis.connection import Connection as RedisConnection

from kombu_delayed.consumer.consumer import Consumer
from kombu_delayed.store.calls.scripts import script
from kombu_delayed.store.claimable import ANSWER_BYTES
from kombu_delayed.store.store import Entry, Store
from kombu_delayed.transport.channel.channel import Channel
from tests.kit.servers import Server

COUNT = 300
QUEUES = [f"q{n:03}" for n in range(COUNT)]
HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def _no_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only commands of the consumer itself are counted."""
    monkeypatch.setattr("kombu_delayed.consumer.lease.keeper.Keeper.watch", lambda *_: None)


@dataclass
class RoundTrips:
    """How often this thread has waited for the answer to a command.

    Another test may have left a thread that tries to reach a server which is gone.
    """

    count: int = 0
    thread: int = field(default_factory=threading.get_ident)
    _sent: set[Any] = field(default_factory=set)

    def sent(self, connection: Any) -> None:
        self._sent.add(connection)

    def read(self, connection: Any) -> None:
        if connection in self._sent and threading.get_ident() == self.thread:
            self._sent.discard(connection)
            self.count += 1

    def of(self, action: Callable[[], Any]) -> int:
        before = self.count
        action()
        return self.count - before


@pytest.fixture
def round_trips(monkeypatch: pytest.MonkeyPatch) -> RoundTrips:
    trips = RoundTrips()
    send, read = RedisConnection.send_packed_command, RedisConnection.read_response

    def counted_send(self: Any, *args: Any, **kwargs: Any) -> Any:
        trips.sent(self)
        return send(self, *args, **kwargs)

    def counted_read(self: Any, *args: Any, **kwargs: Any) -> Any:
        trips.read(self)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(RedisConnection, "send_packed_command", counted_send)
    monkeypatch.setattr(RedisConnection, "read_response", counted_read)
    return trips


@dataclass
class Many:
    """A channel that consumes all the queues, stepped by hand with a clock that is moved."""

    channel: Channel
    client: redis.Redis
    queues: list[str] = field(default_factory=list)
    ahead_seconds: float = 0.0
    started_at: float = field(default_factory=monotonic)

    def take(self, message: Any) -> None:
        self.queues.append(str(message.headers["id"]).partition("-")[0])
        message.ack()

    @property
    def consumer(self) -> Consumer:
        assert self.channel.consumer is not None
        return self.channel.consumer

    def now(self) -> float:
        """A clock that only this test moves: a slow machine causes no extra polls."""
        return self.started_at + self.ahead_seconds

    def step_for(self, seconds: float) -> None:
        """Step whenever the consumer has asked for it; between the steps the clock jumps."""
        end = self.now() + seconds
        while True:
            at = self.consumer.step()
            if self.hand_out():
                continue
            if at >= end:
                return
            self.ahead_seconds += max(at - self.now(), 0.001)

    def step_until(self, count: int) -> None:
        """Step until `count` messages have arrived."""
        for _ in range(1_000):
            self.consumer.step()
            self.hand_out()
            self.ahead_seconds += 0.003
            if len(self.queues) >= count:
                return
        raise AssertionError(f"{len(self.queues)} of {count} messages have come")

    def hand_out(self) -> bool:
        """Hand out the claimed messages; returns whether there were any."""
        before = len(self.queues)
        while self.consumer.hand_out():
            pass
        return len(self.queues) > before

    def lose_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next claims are carried out, and the connection breaks before their answers come."""
        run = self.channel.store.run
        true_many = run.many

        def many(commands: Any) -> Any:
            answers = true_many(commands)
            if commands[0][1] != script("deliver").sha:  # a look at what is ready, or a renewal
                return answers
            monkeypatch.setattr(run, "many", true_many)
            raise redis.ConnectionError("lost")

        monkeypatch.setattr(run, "many", many)

    def settle(self) -> None:
        """Step until the consumer knows of no ready messages."""
        for _ in range(20):
            self.consumer.step()
            self.hand_out()
            self.ahead_seconds += 0.06  # a lost connection is tried again


class NoWake:
    """A wake source that never gets a token."""

    overdue_at = math.inf
    connection = None
    waiting = False

    def start(self, queues: Any) -> None:
        self.waiting = True

    def reset(self) -> None:
        self.waiting = False

    close = reset

    def listens(self, queue: str) -> bool:
        return False

    def check(self, now: float) -> None:
        pass


@pytest.fixture
def many(server: Any, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Many]:
    with Connection(f"delayed+{server.url}") as connection:
        channel = connection.default_channel
        found = Many(channel, client)
        for module in ("consumer", "part", "retrying", "claiming.claims"):
            monkeypatch.setattr(f"kombu_delayed.consumer.{module}.monotonic", found.now)
        monkeypatch.setattr(channel, "_new_wake", NoWake)
        for queue in QUEUES:
            channel.basic_consume(queue, False, found.take, queue)
        yield found


def commands(client: redis.Redis) -> int:
    """All commands that the server has run, including those in scripts, except this query."""
    return int(client.info("stats")["total_commands_processed"])


def sent(id: str, due: str = "", body: str = "") -> Entry:
    """A message that Kombu can read."""
    properties = {"delivery_info": {}, "body_encoding": "base64", "delivery_tag": id}
    message = {"body": body, "headers": {"id": id}, "properties": properties}
    return Entry(id, 0, json.dumps(message), due)


def delayed(store: Store, queue: str, in_ms: int) -> None:
    store.schedule(queue, [sent(queue, due=f"+{in_ms}")])


# Idle.


def test_idle_queues_cost_few_commands(many: Many, client: redis.Redis) -> None:
    """Sent one by one, the slow polls of 300 queues are some 60,000 commands a minute."""
    many.settle()
    before = commands(client)
    many.step_for(60)
    assert commands(client) - before < 60 * 10


def test_so_do_queues_with_a_far_backlog(many: Many, client: redis.Redis, store: Store) -> None:
    """Either this consumer or another has promised to claim when the next message is due."""
    for queue in QUEUES:
        delayed(store, queue, HOUR_MS)
    for queue in QUEUES[::2]:
        store.deliver(queue, "other", 0, 1, lease_ms=HOUR_MS)
    many.settle()
    before = commands(client)
    many.step_for(60)
    assert commands(client) - before < 60 * 80


def test_a_promise_that_nobody_keeps_is_taken_over(many: Many, store: Store) -> None:
    """The consumers that promised to come are dead; one of them knew of an earlier message."""
    overdue, earlier = QUEUES[3], QUEUES[7]
    for queue in (overdue, earlier):
        delayed(store, queue, 2_000)
        store.deliver(queue, "dead", 0, 1, lease_ms=HOUR_MS)
    many.settle()
    many.client.set(store.keys(overdue).armed, "1 dead")
    many.client.set(store.keys(earlier).armed, f"{10**15} dead")
    many.step_for(10)
    assert {many.consumer.sources[queue].due_at < math.inf for queue in (overdue, earlier)} == {
        True
    }


def test_what_stock_producers_send_is_found(many: Many, client: redis.Redis, store: Store) -> None:
    """They leave no token."""
    many.settle()
    for queue in QUEUES[10:40]:
        client.lpush(store.keys(queue).ready[0], sent(queue).message)
    many.step_for(10)
    assert sorted(many.queues) == QUEUES[10:40]


# Together.


def test_it_starts_in_few_round_trips(many: Many, round_trips: RoundTrips) -> None:
    many.channel.basic_qos(0, 8)
    assert round_trips.of(many.settle) < 10
    assert all(many.consumer.lease.holds(queue) for queue in QUEUES)


def test_it_reconnects_in_few_round_trips(
    many: Many, round_trips: RoundTrips, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    many.channel.basic_qos(0, 2 * COUNT)
    many.settle()
    for queue in QUEUES:
        store.publish(queue, [sent(queue)])
    many.consumer.parts[0]._stop_waiting()
    many.lose_answers(monkeypatch)
    many.consumer.step()
    assert many.consumer.parts[0].claims.unsure.keys() == {*QUEUES}
    assert round_trips.of(many.settle) < 60
    assert sorted(many.queues) == QUEUES


def test_it_closes_in_few_round_trips(
    many: Many, round_trips: RoundTrips, client: redis.Redis, store: Store
) -> None:
    many.channel.basic_qos(0, COUNT)
    for queue in QUEUES:
        store.publish(queue, [sent(queue)])
    many.consumer.step()
    assert many.consumer.has_messages
    assert round_trips.of(many.consumer.close) < 12
    sizes = [store.size(queue).ready for queue in QUEUES]
    assert (sum(sizes), client.keys("*unacked*"), client.keys("*consumers")) == (COUNT, [], [])


def test_queues_are_cancelled_in_few_round_trips(many: Many, round_trips: RoundTrips) -> None:
    many.settle()

    def cancel() -> None:
        for queue in QUEUES:
            many.channel.basic_cancel(queue)

    assert round_trips.of(cancel) < 20
    assert not many.consumer.sources


def test_others_are_told_in_few_round_trips(
    many: Many, round_trips: RoundTrips, client: redis.Redis, store: Store
) -> None:
    for queue in QUEUES:
        delayed(store, queue, HOUR_MS)
    many.settle()
    assert round_trips.of(many.consumer.parts[0].step_aside) < COUNT / 10
    assert all(client.zscore(store.keys(queue).wake, "due") for queue in QUEUES)


# Room.


@pytest.mark.parametrize("prefetch_count", [1, 7, COUNT - 1, COUNT * 2])
def test_it_never_claims_more_than_it_has_room_for(
    many: Many, store: Store, prefetch_count: int
) -> None:
    many.channel.basic_qos(0, prefetch_count)
    for queue in QUEUES:
        store.publish(queue, [sent(f"{queue}-{n}") for n in range(3)])
    for _ in range(5):
        many.consumer.step()
        held = sum(unacked for q in QUEUES for _, _, unacked in store.leases.consumers(q))
        assert 0 < held <= prefetch_count


def test_the_bytes_of_their_answers_are_bounded_together(many: Many, store: Store) -> None:
    many.channel.basic_qos(0, COUNT)
    for queue in QUEUES[20:]:
        many.channel.basic_cancel(queue)
    for queue in QUEUES[:20]:
        store.publish(queue, [sent(f"{queue}-{n}", body="x" * 100_000) for n in range(5)])
    many.consumer.step()
    claimed = [len(entry.record) for entry in many.consumer.parts[0].claims.buffer]
    assert len(claimed) >= 20
    assert sum(claimed) < ANSWER_BYTES + 20 * 100_500
    many.step_until(100)


def test_strict_priority_holds_among_many(many: Many, store: Store) -> None:
    many.channel._queue_cycle = many.consumer.session.cycle = priority_cycle()
    many.channel._update_queue_cycle()
    many.channel.basic_qos(0, 10)
    for queue in reversed(QUEUES[:20]):
        store.publish(queue, [sent(f"{queue}-{n}") for n in range(3)])
    many.step_until(60)
    assert many.queues == sorted(many.queues)


def test_a_queue_is_cancelled_while_many_are_claimed(
    many: Many, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example by a signal handler. Messages of the other queues are handed out once."""
    many.channel.basic_qos(0, 50)
    many.settle()
    for queue in QUEUES[:8]:
        store.publish(queue, [sent(f"{queue}-{n}") for n in range(3)])
        many.consumer.sources[queue].ready = True
    together = many.channel.store.together

    def cancelled(calls: Any) -> Any:
        monkeypatch.undo()
        answers = together(calls)
        many.consumer.remove(QUEUES[7])
        return answers

    monkeypatch.setattr(many.channel.store, "together", cancelled)
    many.consumer.step()
    many.hand_out()
    assert sorted(many.queues) == sorted(QUEUES[:7] * 3)
    many.channel.qos.outbox.flush(many.channel.store, many.consumer.lease)
    assert store.size(QUEUES[7]).ready == 3


def test_an_expiring_queue_is_kept_after_a_broken_connection(
    many: Many, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is so even for a consumer that has no room."""
    many.consumer.add(QUEUES[0], False, 60_000)
    many.settle()
    monkeypatch.setattr(many.consumer.parts[0].claims.room, "count", lambda: 0)
    many.ahead_seconds += 30
    deliver = many.channel.store.deliver

    def broken(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(many.channel.store, "deliver", deliver)
        raise redis.ConnectionError("lost")

    monkeypatch.setattr(many.channel.store, "deliver", broken)
    many.settle()
    assert many.consumer.parts[0].claims.agenda.kept.first_at < math.inf


def test_a_consumer_stops_soon_while_the_server_gives_no_answer(
    own_server: Server, round_trips: RoundTrips
) -> None:
    """Each try takes as long as the timeout of a socket, and a worker that stops makes many."""
    options = {"socket_timeout": 1}
    with Connection(f"delayed+{own_server.url}", transport_options=options) as connection:
        channel = connection.channel()
        for queue in QUEUES[:20]:
            channel.basic_consume(queue, False, print, queue)
        with own_server.standing_still():
            assert round_trips.of(channel.retire) == 1
