"""When a lease looks for others that have ended; what it does then is in other tests."""

from __future__ import annotations

import pytest

from kombu_delayed.lease import JUST_AFTER_SECONDS, Keeper, Lease
from kombu_delayed.store import Store
from kombu_delayed.testing import FakeStore

SECONDS = 30.0


@pytest.fixture
def fake() -> FakeStore:
    return FakeStore(now="1000")


def hold(fake: FakeStore, lease: Lease, *queues: str) -> None:
    for queue in queues:
        fake.deliver(queue, lease.consumer, 1, 1, lease_ms=lease.ms)
        lease._asked_at[queue] = lease.clock()


def make(fake: FakeStore) -> Lease:
    store: Store = fake  # type: ignore[assignment]
    return Lease(store, SECONDS)


def test_alone(fake: FakeStore) -> None:
    lease = make(fake)
    hold(fake, lease, "a", "b")
    assert lease.step() == SECONDS / 3


def test_while_all_renew(fake: FakeStore) -> None:
    leases = [make(fake) for _ in range(3)]
    for lease in leases:
        hold(fake, lease, "a")
    for now_ms in range(1000, 61_000, 10_000):
        fake.now = str(now_ms)
        assert [lease.step() for lease in leases] == [SECONDS / 3] * 3


def test_a_dead_one_is_reclaimed_when_its_lease_ends(fake: FakeStore) -> None:
    lease, dead = make(fake), make(fake)
    hold(fake, lease, "a", "b")
    hold(fake, dead, "b")
    for now_ms in (11_000, 21_000, 26_000):
        fake.now = str(now_ms)
        next_ms = now_ms + lease.step() * 1000
    assert next_ms == pytest.approx(31_000 + JUST_AFTER_SECONDS * 1000)
    fake.now = str(int(next_ms))
    assert lease.step() == SECONDS / 3
    assert [name for name, _, _ in fake.consumers("b")] == [lease.consumer]


def test_who_starts_looks_at_once(fake: FakeStore) -> None:
    dead, lease = make(fake), make(fake)
    hold(fake, dead, "a")
    fake.now = "31000"
    hold(fake, lease, "a")
    keeper = Keeper()
    keeper._thread = _NeverStarted()  # type: ignore[assignment]
    keeper.watch(lease)
    wait_seconds = keeper.step()
    assert wait_seconds == pytest.approx(SECONDS / 3, abs=1)
    assert [name for name, _, _ in fake.consumers("a")] == [lease.consumer]


class _NeverStarted:
    def is_alive(self) -> bool:
        return True
