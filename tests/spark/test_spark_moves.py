"""A backlog that is read, without Spark, while its messages move: none is met twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
import redis

from celery_ext.spark.source.paging import Pager, Span, plan
from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.store.ledgers import RESCHEDULE, Job, LedgerStore
from kombu_delayed.store.store import Entry, Store
from tests.kit.state import entry, message

pytestmark = pytest.mark.thorough

#: Due times: a message is read at HERE, and then moves to a time that is read later.
HERE, LATER_HERE, THERE = 2000, 2900, 9000


@pytest.fixture
def store(client: redis.Redis) -> Store:
    """Half of the backlog is due before 3000; each half is read by a task of its own."""
    made = Store(client, partition_size=4, now="1000")
    dues = [*range(2010, 2800, 40), *range(8000, 8800, 40)]
    made.schedule("q", [entry(f"other-{due}", due) for due in dues])
    made.schedule("q", [entry("mover", HERE)])
    return made


def spans_of(store: Store) -> list[Span]:
    [whole] = plan(store, Span("q"), 1000)
    return [Span("q", 0, 3000, whole.last_move), Span("q", 3000, last_move=whole.last_move)]


def ids(store: Store, span: Span, *, messages: bool = True) -> Iterator[str]:
    for page in Pager(store, span, 5, reads_messages=messages):
        yield from (place.member.decode() for place in page.places)


def deliver(store: Store) -> None:
    """The message "mover" is due, and a consumer gets it."""
    store.now = str(HERE)
    found = store.deliver("q", "A", 1, 1, lease_ms=60_000)
    assert found is not None
    assert len(found.records) == 1


def rescheduled(store: Store, due: int) -> None:
    assert Backlog(store, "q").reschedule([Move("mover", str(due))]) == [1]


def rescheduled_by_a_job(store: Store, due: int) -> None:
    job = LedgerStore(store, Job("j", "run", 60, RESCHEDULE))
    move, given = job.reschedule_call("q", [("mover", str(due), "")])
    assert move(store.run, **given) == b"1"


def revised(store: Store, due: int) -> None:
    backlog = Backlog(store, "q")
    (waiting,) = backlog.get("mover")
    assert backlog.revise(waiting, 0, message("other").encode(), due)


def pushed(store: Store, due: int) -> None:
    store.run("HSET", "{q}:unique", "key", "mover")
    done = store.schedule_unique("q", entry("new", due), "key", "debounce")
    assert done == ("pushed", "mover")


def replaced_under_its_own_id(store: Store, due: int) -> None:
    store.run("HSET", "{q}:unique", "key", "mover")
    done = store.schedule_unique("q", entry("mover", due, body="new"), "key", "replace")
    assert done == ("replaced", "mover")


def retried(store: Store, due: int) -> None:
    deliver(store)
    again = Entry("mover", 0, message("mover", headers={"retries": 1}), str(due))
    assert store.schedule("q", [again]).delayed == 1


def retried_under_a_unique_key(store: Store, due: int) -> None:
    deliver(store)
    store.schedule_unique("q", entry("mover", due), "key", "retry")


def parked(store: Store, due: int) -> None:
    deliver(store)
    assert store.park("q", "A", [(1, "mover", due)]) == 1


def replayed(store: Store, due: int) -> None:
    deliver(store)
    assert store.bury("q", "A", [(1, "mover", "why", b"")]) == 1
    assert store.dead.replay("q", ["mover"], due) == 1


MOVES = [
    rescheduled,
    revised,
    rescheduled_by_a_job,
    pushed,
    replaced_under_its_own_id,
    retried,
    retried_under_a_unique_key,
    parked,
    replayed,
]


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize("due", [LATER_HERE, THERE])
@pytest.mark.parametrize("move", MOVES)
def test_a_message_that_moves_is_met_once(
    move: Callable[[Store, int], None], due: int, messages: bool, store: Store
) -> None:
    one, other = spans_of(store)
    reading = ids(store, one, messages=messages)
    found = [next(reading)]
    move(store, due)
    found += [*reading, *ids(store, other, messages=messages)]
    counts = Counter(found)
    assert max(counts.values()) == 1
    assert "mover" in counts
    assert len(found) == 41
    # A new look finds it at its current place.
    looked = [id for span in spans_of(store) for id in ids(store, span, messages=messages)]
    assert Counter(looked) == counts


def test_a_task_that_runs_again_finds_the_same(store: Store) -> None:
    """A message moved after the plan is not in it; one moved before is at its new place."""
    _, other = spans_of(store)
    before = [*ids(store, other)]
    rescheduled(store, THERE)
    assert [*ids(store, other)] == before
    one, other = spans_of(store)
    assert "mover" not in [*ids(store, one)]
    assert "mover" in [*ids(store, other)]


def test_moves_are_numbered_and_forgotten(store: Store, client: redis.Redis) -> None:
    def last() -> int:
        [(member, at)] = client.zrange("{q}:moved", -1, -1, withscores=True)
        assert member == b"mover"
        return int(at)

    rescheduled(store, THERE)
    at = datetime.fromtimestamp(last() / 1e6, timezone.utc)
    assert abs((datetime.now(timezone.utc) - at).total_seconds()) < 60
    assert 0 < client.pttl("{q}:moved") <= 3_600_000  # type: ignore[operator]
    client.zadd("{q}:moved", {"ahead": 2**52, "old": 1})
    rescheduled(store, LATER_HERE)
    assert last() == 2**52 + 1
    assert client.zscore("{q}:moved", "old") is None


def test_nobody_else_is_noted(store: Store, client: redis.Redis) -> None:
    headers: dict[str, Any] = {"retries": 0, "argsrepr": '{"retries": 1}'}
    store.schedule("q", [Entry("first", 0, message("m", headers=headers), "5000")])
    store.schedule("q", [entry("plain", "5000"), entry("relative", "+5000")])
    assert not client.exists("{q}:moved")
