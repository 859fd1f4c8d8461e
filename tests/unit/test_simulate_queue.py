"""The recursion of the simulation, compared with known results of queueing theory."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from celery_ext.spark.simulation.model import Fleet
from celery_ext.spark.simulation.queue import Crash, Queue, Tally, crashes, seconds_of
from kombu_delayed import sizing

Messages = Iterable[tuple[float, float]]


def played(messages: Messages, *died: Crash, **fleet: Any) -> Tally:
    queue = Queue(Fleet(**fleet), crashes=died)
    queue.feed(messages)
    queue.drain()
    return queue.tally


def latenesses(tally: Tally) -> list[float]:
    """The lateness of each message, in order, to half a per cent."""
    return [
        max(seconds_of(number) - sizing.DELIVERY_SECONDS, 0.0)
        for number, messages in enumerate(tally.classes)
        for _ in range(messages)
    ]


def expected(*seconds: float) -> Any:
    return pytest.approx(sorted(seconds), rel=0.006, abs=0.0001)


def mean_wait(tally: Tally) -> float:
    found = latenesses(tally)
    return sum(found) / len(found)


def test_one_slot_with_too_much_work() -> None:
    tally = played([(float(n), 1.5) for n in range(100)])
    assert latenesses(tally) == expected(*(0.5 * n for n in range(100)))
    assert tally.most_seconds == pytest.approx(49.5 + sizing.DELIVERY_SECONDS)
    assert tally.busy_seconds == pytest.approx(150)


def poisson(load: float, count: int, dice: random.Random) -> Iterator[tuple[float, float]]:
    at = 0.0
    for _ in range(count):
        at += dice.expovariate(load)
        yield at, dice.expovariate(1)


def erlang_wait(load: float, servers: int) -> float:
    """The mean wait if run times are 1 s on average."""
    terms = [load**n / math.factorial(n) for n in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(terms) + last) / (servers - load)


@pytest.mark.parametrize(("load", "servers"), [(0.7, 1), (3.2, 4), (18.0, 20)])
def test_random_arrivals_and_run_times(load: float, servers: int) -> None:
    """M/M/c: one worker has all slots, so no message waits for a slot of another worker."""
    tally = played(poisson(load, 400_000, random.Random(5)), slots=servers)
    assert mean_wait(tally) == pytest.approx(erlang_wait(load, servers), rel=0.05)


def crommelin_wait(load: float, servers: int) -> float:
    """The mean wait if all run for 1 s: M/D/c, by Crommelin."""

    def at_least(count: int, mean: float) -> float:
        """The probability that a Poisson count is at least this large."""
        terms = (math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in range(count))
        return max(1 - math.fsum(terms), 0.0)

    return math.fsum(
        at_least(n * servers, n * load) - servers / load * at_least(n * servers + 1, n * load)
        for n in range(1, 400)
    )


@pytest.mark.parametrize(("load", "servers"), [(0.7, 1), (3.2, 4), (18.0, 20)])
def test_random_arrivals_and_equal_run_times(load: float, servers: int) -> None:
    """M/D/c."""
    equal = ((at, 1.0) for at, _ in poisson(load, 400_000, random.Random(6)))
    right = crommelin_wait(load, servers)
    if servers == 1:
        assert right == pytest.approx(load / (1 - load) / 2)  # Pollaczek and Khinchine
    assert mean_wait(played(equal, slots=servers)) == pytest.approx(right, rel=0.05)


def test_workers_claim_in_turn() -> None:
    """The third message goes to the first worker, which is busy, and not to the idle one."""
    messages = [(0.0, 10.0), (1.0, 0.5), (2.0, 0.5)]
    assert latenesses(played(messages, workers=2)) == expected(0, 0, 8)


def test_a_worker_without_room_does_not_claim() -> None:
    messages = [(0.0, 10.0), (1.0, 0.5), (2.0, 0.5)]
    tally = played(messages, workers=2, prefetch_multiplier=1, acks_late=True)
    assert latenesses(tally) == expected(0, 0, 0)


def test_a_claim_takes_what_is_ready() -> None:
    """Of six at one instant the first worker takes four, which it runs one after the other."""
    tally = played([(0.0, 1.0)] * 6, workers=2)
    assert latenesses(tally) == expected(0, 1, 2, 3, 0, 1)


DEATH = Crash(4.0, 0, 3.0)
BACK = 4 + 30 - 3 + 0.01


def after_a_death(messages: Messages, **fleet: Any) -> tuple[Any, int, int, Any]:
    """How late they ran, how many came again, how many were lost, and the seconds of work."""
    tally = played(messages, DEATH, **{"prefetch_multiplier": 4, **fleet})
    return latenesses(tally), tally.redelivered, tally.lost, pytest.approx(tally.busy_seconds)


def test_what_ran_and_what_waited_behind_it_run_again() -> None:
    found = after_a_death([(0, 10), (0, 10)], acks_late=True)
    assert found == (expected(0, BACK + 10), 2, 0, 24)


def test_acked_early_what_ran_is_lost() -> None:
    found = after_a_death([(0, 10), (0, 10), (20, 1)])
    assert found == (expected(0, BACK, 0), 1, 1, 15)


def test_another_worker_carries_on() -> None:
    found = after_a_death([(0, 10), (1, 10), (14, 1)], acks_late=True, workers=2)
    assert found == (expected(0, 0, 0), 1, 0, 25)


def test_nobody_claims_next_until_the_other_one_looks() -> None:
    """It had promised to; the other one checks 4.25 s after 1."""
    found = after_a_death([(0, 1), (1, 1), (4.5, 1)], workers=2)
    assert found == (expected(0, 0, 0.75), 0, 0, 3)


def test_what_is_back_goes_first() -> None:
    messages = [(0, 10), (1, 50), (2, 1), (15, 1)]
    found = after_a_death(messages, acks_late=True, slots=1, restart_seconds=40)
    assert found == (expected(0, 54 - 1, 104 - 2, 105 - 15), 3, 0, 66)


def test_every_message_counts_once_whatever_dies() -> None:
    fleet = Fleet(workers=5, slots=2, crashes_per_day=2000, acks_late=True)
    dice = random.Random(2)
    queue = Queue(fleet, crashes=crashes(fleet, 0.0, dice))
    queue.feed(poisson(8, 5_000, dice), counted=False)
    queue.feed(((700 + due, run) for due, run in poisson(8, 5_000, dice)))
    queue.drain()
    assert sum(queue.tally.classes) == 5_000
    assert all(messages >= 0 for messages in queue.tally.classes)
    assert queue.tally.redelivered > 100
