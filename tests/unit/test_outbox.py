from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_delayed.consumer.outbox import ACK, BURY, Done, Held, Outbox
from kombu_delayed.errors import UNREACHABLE, NodeDown


class Stub:
    """A store with one node that is down and another that refuses commands."""

    errors_of_one_queue = UNREACHABLE

    def __init__(self) -> None:
        self.run = SimpleNamespace(generation=0)
        self.leases = SimpleNamespace(hold_keys=self._hold)
        self.buried: list[Any] = []
        self.held: list[Any] = []
        self.on_errors: list[Any] = []

    def ack(self, queue: str, *_: Any, **__: Any) -> None:
        if queue == "down":
            raise NodeDown
        if queue == "refused":
            raise RuntimeError

    def _hold(self, queue: str, held: Any, on_error: Any) -> None:
        if queue == "down":
            raise NodeDown
        self.held.append(held)
        self.on_errors.append(on_error)

    def fail_first(self) -> None:
        """The server refuses the first of the calls."""
        self.on_errors[0]()

    def bury(self, queue: str, consumer: str, entries: Any) -> None:
        self.buried.append(entries)


def test_what_waits_for_a_node_is_kept_whatever_comes_up_behind_it() -> None:
    """Otherwise it would run again."""
    store: Any = Stub()
    lease: Any = SimpleNamespace(consumer="C")
    outbox = Outbox()
    acks = [Done(ACK, queue, n, "") for n, queue in enumerate(("down", "up", "down", "refused"))]
    outbox.done.extend(acks)
    with pytest.raises(RuntimeError):
        outbox.flush(store, lease)
    assert [*outbox.done] == [acks[0], acks[2], acks[3]]


def test_a_new_master_is_told_why_a_message_was_buried() -> None:
    store: Any = Stub()
    lease: Any = SimpleNamespace(consumer="C")
    outbox = Outbox()
    outbox.done.append(Done(BURY, "up", 1, "id", "too large"))
    outbox.flush(store, lease)
    store.run.generation += 1
    outbox.flush(store, lease)
    assert store.buried == [[(1, "id", "too large", b"")]] * 2


def test_a_new_master_is_told_whose_unique_keys_are_free() -> None:
    store: Any = Stub()
    lease: Any = SimpleNamespace(consumer="C")
    outbox = Outbox()
    outbox.held.extend([Held("up", "k", "a", 60_000), Held("down", "k", "b", 0)])
    outbox.held.append(Held("up", "k", "a", 0))
    for generation in range(2):
        store.run.generation = generation
        outbox.flush(store, lease)
    told = [("k", "a", 60_000), ("k", "a", 0)]
    assert [each for batch in store.held for each in batch] == told * 2
    assert [*outbox.held] == [Held("down", "k", "b", 0)]
    assert outbox.has_any


def test_what_is_sent_again_says_how_long_a_task_holds_its_key_now() -> None:
    """The server may refuse the earlier call after the later one was sent."""
    store: Any = Stub()
    lease: Any = SimpleNamespace(consumer="C")
    outbox = Outbox()
    for left_ms in (80_000, 90_000_000):
        outbox.hold(Held("up", "k", "a", left_ms))
        outbox.flush(store, lease)
    store.fail_first()
    outbox.flush(store, lease)
    assert store.held == [[("k", "a", 80_000)], *[[("k", "a", 90_000_000)]] * 2]


def told_to_two_masters(*held: Held) -> Any:
    """The calls that a server gets, and then the one that takes its place."""
    store: Any = Stub()
    lease: Any = SimpleNamespace(consumer="C")
    outbox = Outbox()
    for each in held:
        outbox.hold(each)
    for generation in range(2):
        store.run.generation = generation
        outbox.flush(store, lease)
    return store.held


def test_a_key_in_one_queue_is_free_while_a_retry_holds_it_in_another() -> None:
    retry = Held("other", "k", "a", 80_000, goes_on=True)
    told = told_to_two_masters(Held("up", "k", "a", 0), retry)
    assert told == [[("k", "a", 0)], [("k", "a", 80_000)], [("k", "a", 0)]]


def test_a_new_master_is_not_told_of_a_task_that_another_worker_may_run_by_now() -> None:
    """If that worker were killed, the key would stay for as long as a retry may wait."""
    retry = Held("up", "k", "a", 90_000_000, goes_on=True)
    told = told_to_two_masters(Held("up", "k", "a", 80_000), retry, Held("up", "k", "b", 0))
    assert told[1] == [("k", "b", 0)]


class Counted(deque[Done]):
    """Counts the items that are read from it."""

    reads = 0

    def __iter__(self) -> Iterator[Done]:
        for each in super().__iter__():
            self.reads += 1
            yield each


@pytest.mark.parametrize("queues", [["down"], ["up"], ["up", "down"]])
def test_a_flush_reads_in_proportion_to_what_waits(queues: list[str]) -> None:
    def reads(rounds: int) -> int:
        store: Any = Stub()
        lease: Any = SimpleNamespace(consumer="C")
        outbox = Outbox()
        outbox.done = done = Counted(
            Done(ACK, queue, n, "") for n, queue in enumerate(queues * rounds)
        )
        outbox.flush(store, lease)
        assert len(done) == rounds * queues.count("down")
        return done.reads

    assert reads(8_000) < 5 * reads(2_000)
