"""The scripts with a ledger: each id is done once per job."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from celery_ext import Delayed
from celery_ext.control.bulk.schedule import schedule_many
from kombu_delayed.connection.commands import numbers
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.events import newest, pages, read
from kombu_delayed.store.ledgers import Job, LedgerStore, done_by_run
from kombu_delayed.store.store import Entry, Store
from tests.kit.state import entry, message, promoted, state

JOB = Job("j", "run", 100)
A, B = message("a"), message("b")


@pytest.fixture
def ledger(store: Store) -> LedgerStore:
    store.now = "1000"
    return LedgerStore(store, JOB)


def reschedule(store: LedgerStore, *moves: tuple[str, str, str]) -> list[int]:
    move, given = store.reschedule_call("q", moves)
    return numbers(move(store.run, **given))


def kept(client: redis.Redis) -> tuple[Any, dict[str, Any]]:
    """The ledger, which may expire in 100 s, and all other data."""
    found: dict[str, Any] = dict(state(client))
    assert found.pop("{q}:ledgers-until") == {"{q}:job:j": 101_000}
    return found.pop("{q}:job:j"), found


def test_what_the_job_has_done_stays_done(ledger: LedgerStore, client: redis.Redis) -> None:
    both = [entry("a", 2000), entry("b", 500)]
    ledger.schedule("q", both)
    client.delete("q", "{q}:partitions", "{q}:delayed:2000", "{q}:messages", "{q}:wake")
    assert ledger.schedule("q", both) == (0, 0, 2)
    assert kept(client)[1] == {}
    assert LedgerStore(ledger, Job("other", "run", 100)).schedule("q", both[:1]) == (1, 0, 0)


def test_two_attempts_of_a_run_at_a_time(ledger: LedgerStore, store: Store) -> None:
    """A row that one of them has scheduled and a worker has run by now is skipped by the other."""
    other = LedgerStore(store, JOB)
    rows = [entry(f"{n}", 2000) for n in range(4)]
    assert ledger.schedule("q", rows[:2]) == (2, 0, 0)
    Backlog(store, "q").cancel(["0", "1"])
    assert other.schedule("q", rows[:3]) == (1, 0, 2)
    assert ledger.schedule("q", rows[2:]) == (1, 0, 1)
    assert other.schedule("q", rows[3:]) == (0, 0, 1)
    assert done_by_run(store, JOB, "q") == 4
    again = Job("j", "again", 100)
    assert LedgerStore(store, again).schedule("q", [*rows, entry("b", 3000)])[0] == 1
    assert done_by_run(store, again, "q") == 1
    assert done_by_run(store, JOB, "other") == 0


def test_reschedule(ledger: LedgerStore, store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 3000)])
    client.delete("{q}:wake")
    assert reschedule(ledger, ("a", "1500", ""), ("b", "1000", ""), ("c", "9", "")) == [1, 1, 0]
    job, rest = kept(client)
    assert job == {"a": "1", "b": "1", "c": "0", "\x1frun": "2"}
    assert rest == {
        "q": [promoted(B, 1000)],
        "{q}:partitions": {"2000": 1500},
        "{q}:delayed:2000": {"a": 1500},
        "{q}:messages": {"a": "0" + A},
        "{q}:wake": {"due": 1500, "now": 0},
    }
    assert client.ttl("{q}:job:j") == -1
    assert reschedule(ledger, ("a", "1900", ""), ("c", "9", "")) == [0, 0]
    assert kept(client)[1] == rest


def test_what_a_job_does_is_one_event_of_a_call(
    ledger: LedgerStore, store: Store, client: redis.Redis
) -> None:
    """Messages that were due already are included, and have a due time from then on."""
    ledger.event_limit = store.event_limit = 100
    texts = {id: message(id, headers={"id": id}) for id in "abd"}
    a, b = (Entry(id, 0, texts[id], due) for id, due in (("a", "2000"), ("b", "500")))
    ledger.schedule("q", [a, b, a])
    mover = LedgerStore(ledger, Job("j", "run", 100, "reschedule"))
    reschedule(mover, ("a", "3000", ""), ("c", "9", ""))
    store.now = "1000"
    assert store.deliver("q", "w1@host:7:abcd", 10, 1, lease_ms=30_000) is not None
    move, given = ledger.cancel_call("q", ["a", "b"])
    assert numbers(move(store.run, **given)) == [1, 0]
    move, given = ledger.restore_call("q", [(b"d", b"04000" + texts["d"].encode())])
    move(store.run, **given)
    ledger.schedule("q", [a])  # adds no event
    assert [
        (event.event, event.id, event.due_ms, event.job, event.consumer[:2])
        for event in read(store, "q")
    ] == [
        ("scheduled", "a", 2000, "j", ""),
        ("scheduled", "b", 500, "j", ""),
        ("rescheduled", "a", 3000, "j", ""),
        ("delivered", "b", 500, "", "w1"),
        ("cancelled", "a", 3000, "j", ""),
        ("scheduled", "d", 4000, "j", ""),
    ]
    assert client.xlen("{q}:events") == 5
    assert [event.id for event in newest(store, "q", 3)] == ["b", "a", "d"]
    assert [event.id for event in read(store, "q", count=1)] == ["a", "b"]
    [pages_of] = pages(store, "q")
    assert len(pages_of) == 6


def test_events_of_a_job_are_read_once(
    ledger: LedgerStore, store: Store, client: redis.Redis
) -> None:
    """The server would otherwise send most entries many times: each has 250 events."""
    ledger.event_limit = store.event_limit = 100_000
    for n in range(0, 10_000, 250):
        ledger.schedule("q", [entry(f"{n + each}", 2000) for each in range(250)])

    def sent() -> int:
        return int(client.info("stats")["total_net_output_bytes"])  # type: ignore[index]

    before = sent()
    client.xrange("{q}:events")
    once = sent() - before
    before = sent()
    assert [event.id for page in pages(store, "q") for event in page] == [*map(str, range(10_000))]
    assert sent() - before < 1.2 * once


def test_bulk_scheduling(delayed: Delayed) -> None:
    rows = [("t", (n,), {}, "2100-01-01", {"task_id": f"{n}"}) for n in range(3)]
    refused: list[Any] = []
    ledger = LedgerStore(delayed.store, JOB)
    given = [*rows, "no row", *rows]
    report = schedule_many(delayed, given, store=ledger, on_refused=refused.append)
    assert (report.delayed, report.already, report.refused) == (3, 3, 1)
    assert report.refusals == []
    assert [each.row for each in refused] == [3]
    delayed.backlog("celery").cancel(["0", "1", "2"])
    assert schedule_many(delayed, rows, store=ledger).already == 3
    assert schedule_many(delayed, rows).delayed == 3
