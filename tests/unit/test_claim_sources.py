"""Sources of claims: how a consumer estimates the server's time, and which queues have turns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from time import monotonic, time

import pytest

from kombu_delayed.consumer.claiming.sources import Agenda, Buffer, ServerClock, Source
from kombu_delayed.consumer.policy.admission import Claimed


def test_before_the_first_answer_it_is_this_machines_time() -> None:
    """A consumer may already have messages whose policies ask for the time."""
    assert ServerClock().now_ms() == pytest.approx(time() * 1000, abs=60_000)


def test_then_it_is_the_servers() -> None:
    clock = ServerClock()
    clock.compare(5_000_000, monotonic())
    assert clock.now_ms() == pytest.approx(5_000_000, abs=60_000)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the monotonic clock."""
    return lambda now: monkeypatch.setattr(f"{ServerClock.__module__}.monotonic", lambda: now)


def test_an_answer_that_was_long_under_way_changes_nothing(at: Callable[[float], None]) -> None:
    """Otherwise the consumer would come too late for the next message, by as much."""
    clock = ServerClock()
    at(10)
    clock.compare(1_000_000, 9.999)
    at(15)
    clock.compare(1_001_000, 11)
    assert clock.now_ms() == pytest.approx(1_005_000, abs=2)


def test_the_servers_clock_is_set_back(at: Callable[[float], None]) -> None:
    clock = ServerClock()
    at(10)
    clock.compare(1_000_000, 9.999)
    at(15)
    clock.compare(500_000, 11)
    assert clock.now_ms() == pytest.approx(500_000, abs=2)


class Endless:
    """A valid `queue_order_strategy` that names the queues again and again."""

    def __init__(self, *queues: str) -> None:
        self._queues = cycle(queues)

    def consume(self, n: int) -> list[str]:
        return [*islice(self._queues, min(n, 1_000))]


def test_no_queue_has_more_turns_than_there_are_queues() -> None:
    agenda = Agenda()
    for queue in "ab":
        Source(queue).file_in(agenda)
    wanted = agenda.wanted(Endless("a", "b"), turns=2)
    assert [[source.queue for source in shards] for shards in wanted] == [["a"], ["b"]]


def test_a_message_is_taken_out_while_the_keeper_gives_others_back() -> None:
    """The keeper's thread leaves messages of queues without acks in the buffer."""
    given_back, left = Claimed("mails", 1, b"first"), Claimed("live", 2, b"second")

    class Taken(Buffer):
        def popleft(self) -> Claimed:
            self.take_all()
            self.append(left)
            return super().popleft()

    buffer = Taken([given_back, left])
    assert not buffer.take_out(given_back)
    assert [*buffer] == [left]
    assert buffer.take_out(left)
