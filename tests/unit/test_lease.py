"""When a consumer counts as dead, by a server and clocks that tests move."""

from __future__ import annotations

import logging
import math
import socket
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_delayed.consumer.lease.consumer_id import consumer_id, lease_seconds_of
from kombu_delayed.consumer.lease.keeper import Keeper
from kombu_delayed.consumer.lease.lease import FEW_QUEUES, IDLE_LEASES, Lease
from kombu_delayed.consumer.lease.reclaim import JUST_AFTER_SECONDS
from kombu_delayed.errors import UNREACHABLE
from kombu_delayed.store.leases import Renewal
from kombu_delayed.store.store import Store
from tests.kit.state import entry

SECONDS = 30.0
HOUR = 3600.0


class World:
    """A server, its clock and ours, and consumers whose keepers the tests step."""

    def __init__(self, store: Store) -> None:
        self.at = 1_000_000.0
        self.server_ahead = 500.0
        self.store = store
        self.server = object()
        self.is_cut = False
        self._next: dict[Lease, float] = {}
        self.tick()

    def tick(self) -> None:
        self.store.now = str(int((self.at + self.server_ahead) * 1000))

    def consumer(
        self, *queues: str, seconds: float = SECONDS, name: str | None = None, holds: bool = True
    ) -> Lease:
        lease = Lease(Wired(self), seconds, self.server)  # type: ignore[arg-type]
        lease.clock = lambda: self.at  # type: ignore[method-assign]
        lease.consumer = name or lease.consumer
        for queue in queues or ("q",):
            if holds:
                self.store.publish(queue, [entry(lease.consumer)])
            asked = lease.ask(queue)
            self.store.deliver(queue, lease.consumer, 1, 1, lease_ms=lease.ms)
            lease.grant(queue, asked, holds)
        self._next[lease] = self.at
        return lease

    def dies(self, lease: Lease) -> None:
        del self._next[lease]

    def run(self, seconds: float) -> None:
        """Let time pass while the keepers do their due work."""
        end = self.at + seconds
        while self._next and (at := min(self._next.values())) <= end:
            self.at = max(self.at, at)
            self.tick()
            for lease in [each for each, due in self._next.items() if due <= self.at]:
                try:
                    self._next[lease] = self.at + lease.step()
                except UNREACHABLE:
                    self._next[lease] = self.at + min(1.0, lease.seconds / 10)
        self.at = end
        self.tick()

    def step_clock(self, seconds: float) -> None:
        self.server_ahead += seconds
        self.tick()

    def cut(self) -> None:
        self.is_cut = True

    def heal(self) -> None:
        self.is_cut = False

    def alive(self, *leases: Lease) -> bool:
        return all(lease.consumer in self.names() and not lease.lost for lease in leases)

    def names(self, queue: str = "q") -> set[str]:
        return {name for name, _, _ in self.store.leases.consumers(queue)}


class Wired:
    """The store of the world, while there is a connection."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.renewed: list[tuple[int, int]] = []
        self.leases = self

    @property
    def dictionaries(self) -> Any:
        self._check()
        return self._world.store.dictionaries

    def renew_all(self, queues: Any, renewed: Any, *args: Any) -> Renewal:
        self._check()
        self.renewed.append((len(queues), len(renewed)))
        return self._world.store.leases.renew_all(queues, renewed, *args)

    def reclaim(self, *args: Any) -> int:
        self._check()
        return self._world.store.leases.reclaim(*args)

    def deliver(self, *args: Any, **options: Any) -> Any:
        self._check()
        return self._world.store.deliver(*args, **options)

    def was_reclaimed(self, *args: Any) -> bool:
        self._check()
        return self._world.store.leases.was_reclaimed(*args)

    def _check(self) -> None:
        if self._world.is_cut:
            raise ConnectionError


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeper, "watch", lambda keeper, lease: None)


@pytest.fixture
def world(store: Store) -> World:
    return World(store)


def test_the_length_is_in_the_name() -> None:
    assert lease_seconds_of(consumer_id("w1@a-7", 2.5)) == 2.5
    assert lease_seconds_of("w1@a-7:12:0123abcd") is None
    assert consumer_id("w1@a-7", 2.5).rsplit(":", 2)[0] == "w1@a-7"


def test_a_dead_one_is_reclaimed_when_its_lease_ends(world: World) -> None:
    lease, dead = world.consumer("q", "other"), world.consumer()
    world.run(SECONDS * 2)
    world.dies(dead)
    (left_ms,) = (ms for name, ms, _ in world.store.leases.consumers("q") if name == dead.consumer)
    world.run(left_ms / 1000 - JUST_AFTER_SECONDS)
    assert dead.consumer in world.names()
    world.run(3 * JUST_AFTER_SECONDS)
    assert world.names() == {lease.consumer}
    assert world.store.size("q").ready == 1


@pytest.mark.parametrize("leases", [1.5, 1.8, 3.0, 50.0])
def test_an_outage_of_everybody(world: World, leases: float) -> None:
    everybody = [world.consumer() for _ in range(3)]
    world.run(SECONDS)
    world.cut()
    world.run(leases * SECONDS)
    world.heal()
    world.run(5 * SECONDS)
    assert world.alive(*everybody)


def test_who_is_dead_after_an_outage_of_everybody(world: World) -> None:
    lease, dead = world.consumer(), world.consumer()
    world.run(SECONDS)
    world.dies(dead)
    world.cut()
    world.run(3 * SECONDS)
    world.heal()
    world.run(SECONDS)
    assert dead.consumer in world.names()
    world.run(3)
    assert world.names() == {lease.consumer}


def test_a_whole_fleet_dies(world: World) -> None:
    """One call names only some of them."""
    survivor, dead = world.consumer(), [world.consumer() for _ in range(250)]
    for lease in dead:
        world.dies(lease)
    world.run(4 / 3 * SECONDS)
    assert world.names() == {survivor.consumer}


def test_who_reclaims_for_long_renews_its_own_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = "q", "q1", "q2"
    survivor, dead = world.consumer(*queues), [world.consumer(*queues) for _ in range(90)]
    reclaim = survivor.store.reclaim  # type: ignore[attr-defined]

    def slowly(queue: str, *given: Any) -> Any:
        world.at += SECONDS / 100
        world.tick()
        assert dict(world.store.leases.ends(queue))[survivor.consumer] > 0
        return reclaim(queue, *given)

    monkeypatch.setattr(survivor.store, "reclaim", slowly)
    for lease in dead:
        world.dies(lease)
    world.run(5 * SECONDS)
    assert [world.names(queue) for queue in queues] == 3 * [{survivor.consumer}]


def test_an_outage_of_one(world: World) -> None:
    lease, other = world.consumer(), world.consumer()
    world.run(SECONDS)
    world.dies(other)
    world.run(1.1 * SECONDS)
    assert world.names() == {lease.consumer}
    assert other.renew("q", world.store) is False
    assert other.lost


@pytest.mark.parametrize("step", [HOUR, -HOUR, 60.0, -60.0, 20.0, -20.0])
@pytest.mark.parametrize("holds", [True, False])
def test_the_clock_of_the_server_is_set(world: World, step: float, holds: bool) -> None:
    everybody = [world.consumer(holds=holds) for _ in range(3)]
    world.run(2.5 * SECONDS)
    world.step_clock(step)
    world.run(5 * SECONDS)
    assert world.alive(*everybody)


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_many_queues_and_the_clock_is_set(world: World, step: float) -> None:
    queues = [f"q{n}" for n in range(2 * FEW_QUEUES)]
    everybody = [world.consumer("q", *queues, holds=False) for _ in range(2)]
    world.run(20 * SECONDS)
    world.step_clock(step)
    world.run(20 * SECONDS)
    assert world.alive(*everybody)
    assert all(len(world.names(queue)) == 2 for queue in queues)


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_who_died_before_the_clock_was_set(world: World, step: float) -> None:
    lease, dead = world.consumer(), world.consumer()
    world.run(SECONDS)
    world.dies(dead)
    world.run(SECONDS / 2)
    world.step_clock(step)
    world.run(SECONDS)
    assert dead.consumer in world.names()
    world.run(SECONDS / 2)
    assert world.names() == {lease.consumer}


@pytest.mark.parametrize("leases", [-0.5, -2, -4, -6])
@pytest.mark.parametrize("queues", [1, 2 * FEW_QUEUES])
def test_who_died_and_the_clock_is_set_back_by_some_leases(
    world: World, leases: float, queues: int
) -> None:
    others = [f"q{n}" for n in range(queues - 1)]
    lease, dead = (world.consumer("q", *others) for _ in range(2))
    world.run(2.5 * SECONDS)
    world.dies(dead)
    world.step_clock(leases * SECONDS)
    world.run(SECONDS + 10)
    assert world.names() == {lease.consumer}
    assert world.store.size("q").ready == 1


def test_who_was_reclaimed_while_its_clock_stood_still(world: World) -> None:
    lease, stopped = world.consumer(), world.consumer()
    world.run(SECONDS)
    world.dies(stopped)
    now = world.at
    world.run(2 * SECONDS)
    assert world.names() == {lease.consumer}
    stopped.clock = lambda: now + 1  # type: ignore[method-assign]
    assert not stopped.may_have_ended("q")
    assert not stopped.renew("q", world.store)
    assert world.names() == {lease.consumer}


def test_a_server_that_starts_with_old_data(world: World) -> None:
    leases, other = [world.consumer() for _ in range(2)], world.consumer("other")
    copies = {key: world.store.run("DUMP", key) for key in world.store.run("KEYS", "*")}
    world.run(3 * SECONDS)
    for key, copy in copies.items():
        world.store.run("RESTORE", key, 0, copy, "REPLACE")
    world.run(5 * SECONDS)
    assert world.alive(*leases)
    assert world.names("other") == {other.consumer}


def test_an_older_consumer_with_a_longer_lease_is_not_taken_for_late(world: World) -> None:
    lease = world.consumer()
    other = world.consumer(seconds=20 * SECONDS, name="w:1:0123abcd")
    world.run(60 * SECONDS)
    assert world.alive(lease, other)


def test_a_process_that_was_stopped_reclaims_nothing_at_once(world: World) -> None:
    lease, other = world.consumer(), world.consumer()
    world.run(SECONDS)
    world.at += 2 * SECONDS  # both were stopped: the machine was suspended
    world.tick()
    world.run(SECONDS / 3)
    assert world.alive(lease, other)


def test_a_connection_that_is_closed_while_idle_delays_no_reclaim(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers, proxies and load balancers with an idle timeout do that."""
    lease, dead = world.consumer(), world.consumer()
    wire, step = world.store.run, lease.step

    def step_after_an_end() -> float:
        wire._connection._sock.shutdown(socket.SHUT_RDWR)
        monkeypatch.setattr(wire, "_used_at", -math.inf)
        return step()

    lease.step = step_after_an_end  # type: ignore[method-assign]
    world.run(SECONDS)
    world.dies(dead)
    world.run(1.1 * SECONDS)
    assert world.names() == {lease.consumer}


def test_leases_of_different_lengths(world: World) -> None:
    short, long = world.consumer(seconds=3), world.consumer(seconds=60)
    world.run(200)
    assert world.alive(short, long)
    world.dies(long)
    world.run(200)
    assert world.names() == {short.consumer}


def test_who_has_just_started_waits_for_half_a_lease(world: World) -> None:
    dead = world.consumer()
    world.dies(dead)
    world.run(2 * SECONDS)
    lease = world.consumer()
    world.run(SECONDS / 2 - 1)
    assert dead.consumer in world.names()
    world.run(1.1)
    assert world.names() == {lease.consumer}


# Many queues.


def test_where_nothing_is_held_renewals_are_rare(world: World) -> None:
    queues = [f"q{n}" for n in range(200)]
    lease = world.consumer(*queues, holds=False)
    world.consumer("q0")
    world.run(IDLE_LEASES * SECONDS)
    calls = lease.store.renewed  # type: ignore[attr-defined]
    calls.clear()
    world.run(60 * SECONDS)
    renewed = sum(count for _, count in calls)
    assert {looked for looked, _ in calls} == {200}
    assert renewed <= 200 * 60 / (IDLE_LEASES - 1)
    assert not lease.lost


def test_what_is_taken_has_a_short_lease_at_once(world: World) -> None:
    queues = [f"q{n}" for n in range(200)]
    lease, other = world.consumer(*queues, holds=False), world.consumer("q7")
    world.run(2 * SECONDS)
    world.store.publish("q7", [entry("a")])
    asked = lease.ask("q7")
    assert world.store.deliver("q7", lease.consumer, 1, 9, lease_ms=lease.ms, leased=True)
    lease.grant("q7", asked, True)
    world.run(10 * SECONDS)
    assert not lease.lost
    world.dies(lease)
    world.run(1.1 * SECONDS)
    assert world.names("q7") == {other.consumer}


def test_a_claim_whose_answer_was_lost_shortens_its_lease(world: World) -> None:
    """The keeper may assume a longer lease than the server has: its next look finds out."""
    queues = [f"q{n}" for n in range(200)]
    lease, other = world.consumer(*queues, holds=False), world.consumer("q7")
    world.run(2 * SECONDS)
    world.store.publish("q7", [entry("a")])
    world.store.deliver("q7", lease.consumer, 1, 9, lease_ms=lease.ms, leased=True)
    world.run(10 * SECONDS)
    assert world.names("q7") == {lease.consumer, other.consumer}
    assert not lease.lost


def test_a_queue_that_is_left_during_a_renewal_does_not_end_the_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = world.consumer("q", "q1")
    renew_all = lease.store.renew_all  # type: ignore[attr-defined]

    def leave_before(queues: Any, renewed: Any, *args: Any) -> Renewal:
        if "q1" in renewed:
            lease.forget("q1")
            world.store.leases.leave("q1", lease.consumer)
        return renew_all(queues, renewed, *args)

    monkeypatch.setattr(lease.store, "renew_all", leave_before)
    world.run(2 * SECONDS)
    assert world.alive(lease)
    assert lease.queues == {"q"}
    assert not lease.outlasted
    assert world.names("q1") == set()


# The thread.


def test_a_lease_that_cannot_be_renewed_stops_no_other() -> None:
    keeper, stepped = Keeper(), set()

    def fail(name: str) -> float:
        stepped.add(name)
        raise RuntimeError("whatever it is")

    for name in "AB":
        kept: Any = _Hashable(SimpleNamespace(consumer=name, seconds=30.0, next_step_at=0.0))
        kept.step = partial(fail, name)
        keeper._leases.add(kept)
    again_in = keeper.step()
    assert stepped == {"A", "B"}
    assert again_in is not None
    assert again_in <= 1.0


def test_an_outage_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    keeper = Keeper()
    answers: list[float | None] = [None, None, 10.0, None]

    def step() -> float:
        if (seconds := answers.pop(0)) is None:
            raise ConnectionError("the server is away")
        return seconds

    kept: Any = _Hashable(SimpleNamespace(consumer="A", seconds=30.0, step=step))
    keeper._leases.add(kept)
    with caplog.at_level(logging.WARNING):
        while answers:
            kept.next_step_at = 0.0
            keeper.step()
    assert caplog.text.count("Cannot renew the lease of A now: the server is away") == 2


class _Hashable(SimpleNamespace):
    __hash__ = object.__hash__

    def __init__(self, other: SimpleNamespace) -> None:
        super().__init__(**vars(other))
