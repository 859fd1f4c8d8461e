"""Pages of the backlog, without Spark: messages that stay are met once, despite other changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import redis

from celery_ext.spark.source import paging
from celery_ext.spark.source.paging import Page, Pager, Place, Span, plan
from kombu_delayed.inspection.backlog import NEVER_MS, Backlog, Move
from kombu_delayed.inspection.gate_usage import waiting_count
from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use, put_ticket
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.state import entry, message

pytestmark = pytest.mark.thorough


@pytest.fixture(params=[3, 1000])
def small(
    request: pytest.FixtureRequest, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> Store:
    """A backlog of small partitions, with the clock stopped; few or all bounds in a call."""
    monkeypatch.setattr(paging, "INDEX_LIMIT", request.param)
    return Store(client, partition_size=4, now="1000")


def met(store: Store, span: Span, size: int = 5, *, messages: bool = True) -> list[Place]:
    pages = Pager(store, span, size, reads_messages=messages)
    return [place for page in pages for place in page.places]


def places(dues: dict[str, int], low: int = 0, high: int = NEVER_MS) -> list[Place]:
    return sorted(Place(due, id.encode()) for id, due in dues.items() if low <= due < high)


def fill(store: Store, chance: random.Random, count: int, spread: int) -> dict[str, int]:
    dues = {f"{n}": 2000 + chance.randrange(spread) for n in range(count)}
    store.schedule("q", [entry(id, due) for id, due in dues.items()])
    return dues


@pytest.mark.parametrize("size", [3, 100])
def test_what_waits_at_a_gate_is_met_once(size: int, small: Store) -> None:
    gate = Gate("v", (LimitNumbers("all", 1),))
    dues = {f"{n}": 2000 + n % 7 for n in range(60)}
    for id, due in dues.items():
        text = put_ticket(message(id), Ticket(uses=(Use("all"),)).text("v", id))
        small.schedule("q", [Entry(id, 0, text, str(due))])
    small.now = "2004"
    answer = small.deliver("q", "A", 1, 1, lease_ms=1000, gate=gate, promotions=20)
    assert answer is not None
    assert 9 < waiting_count(small, "q") < 20
    del dues[body_of(answer.records[0])]
    for spans in ([Span("q")], plan(small, Span("q"), 10), [Span("q", 0, 2003), Span("q", 2003)]):
        found = [place for span in spans for place in met(small, span, size)]
        assert sorted(found) == places(dues)


@pytest.mark.parametrize("size", [3, 100])
@pytest.mark.parametrize("moment", range(4))
def test_what_comes_to_a_gate_meanwhile_is_met_once(
    size: int, moment: int, small: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message leaves its partition before or after that is read."""
    gate = Gate("v", (LimitNumbers("all", 1),))
    dues = {f"{n}": 2000 + n % 7 for n in range(60)}
    for id, due in dues.items():
        text = put_ticket(message(id), Ticket(uses=(Use("all"),)).text("v", id))
        small.schedule("q", [Entry(id, 0, text, str(due))])
    pages, found = Pager._pages, list[Place]()

    def come(now: str) -> None:
        small.now = now
        small.deliver("q", "A", 0, 1, lease_ms=1000, gate=gate, promotions=1000)

    def come_first(self: Pager) -> Iterator[Page]:
        come("2003" if moment < 3 else "2009")
        yield from pages(self)

    monkeypatch.setattr(paging, "server_ms", lambda store, queue: 2010)  # when reading has ended
    monkeypatch.setattr(Pager, "_pages", come_first)
    for n, page in enumerate(Pager(small, Span("q"), size, reads_messages=True)):
        found += page.places
        if n == moment:
            come("2009")
    assert waiting_count(small, "q")
    assert sorted(found) == places(dues)


def test_what_waits_behind_some_that_leave(client: redis.Redis, small: Store) -> None:
    client.zadd("{q}:delayed:waiting", {f"{n}": 1000 + n for n in range(40)})
    pager, ask = Pager(small, Span("q", 1020, 2000), 5, reads_messages=False), small.run.insist

    def ask_slowly(*command: Any) -> Any:
        answer = ask(*command)
        if command[0] == "ZCOUNT":
            client.zremrangebyrank("{q}:delayed:waiting", 0, 9)
        return answer

    pager._ask = ask_slowly
    assert len([place for page in pager for place in page.places]) == 20


def body_of(record: bytes) -> str:
    return record.decode().split('"body":"')[1].split('"')[0]


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize(("rows", "size"), [(1, 100), (10, 7), (50, 3), (1000, 1), (1000, 5)])
@pytest.mark.parametrize("spread", [1, 5, 30, 10_000])
def test_all_in_order(rows: int, size: int, spread: int, messages: bool, small: Store) -> None:
    """Plans spans of `rows` messages, read in pages of `size`."""
    chance = random.Random(rows)
    dues = fill(small, chance, 200, spread)
    ends = sorted(2000 + chance.randrange(-2, spread + 2) for _ in "ab")
    for low, high in [(0, NEVER_MS), (ends[0], ends[1] + 1), (2100, 9000)]:
        spans = plan(small, Span("q", low, high), rows)
        assert (spans[0].from_ms, spans[-1].to_ms) == (low, high)
        assert all(one.to_ms == next_.from_ms for one, next_ in pairwise(spans))
        found = [place for span in spans for place in met(small, span, size, messages=messages)]
        assert found == places(dues, low, high)
    if spread == 10_000 and rows == 50:
        sizes = [len(met(small, span)) for span in plan(small, Span("q"), rows)]
        assert len(sizes) in (4, 5)
        assert max(sizes) < 2 * rows


def disturb(store: Store, chance: random.Random, ids: list[str], n: int) -> None:
    """Acts as any other user of the broker; `ids` are those that it may change."""
    some, backlog = chance.sample(ids, min(len(ids), 4)), Backlog(store, "q")
    deed = chance.randrange(3)
    if deed == 0:
        backlog.cancel(some)
    elif deed == 1:
        backlog.reschedule(Move(id, str(1500 + chance.randrange(2000))) for id in some)
    else:
        dues = [1500 + chance.randrange(2000) for _ in range(9)]
        store.schedule("q", [entry(f"new-{n}-{due}-{k}", due) for k, due in enumerate(dues)])


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize(
    ("spread", "partition_size"), [(1, 4), (3, 4), (500, 4), (9, 40), (500, 40)]
)
@pytest.mark.parametrize("seed", range(2))
def test_while_others_work(
    seed: int, spread: int, partition_size: int, messages: bool, small: Store, client: redis.Redis
) -> None:
    """Partitions are shorter than a page, or longer, and split."""
    small.partition_size = partition_size
    chance = random.Random(seed)
    dues = fill(small, chance, 150, spread)
    others = [id for id in dues if int(id) % 3 == 0]
    found: list[Place] = []
    for n, page in enumerate(Pager(small, Span("q"), 5, reads_messages=messages)):
        found += page.places
        disturb(small, chance, others, n)
    assert found == sorted(found)
    assert max(Counter(found).values()) == 1
    stayed = {id: due for id, due in dues.items() if id not in others}
    assert [place for place in found if place.member.decode() in stayed] == places(stayed)
    check_backlog(client, "q")


@pytest.mark.parametrize(("length", "rows"), [(5, 320), (1000, 10)])
def test_large_messages_are_read_a_few_at_a_time(
    length: int, rows: int, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would have to hold all texts of a page in one answer."""
    monkeypatch.setattr(paging, "PAGE_BYTES", 10_000)
    dues = {f"{n}": 2000 + n for n in range(1000)}
    text, store = message("x" * length), Store(client, now="1000")
    store.schedule("q", [Entry(id, 0, text, str(due)) for id, due in dues.items()])
    pages = [*Pager(store, Span("q"), 500, reads_messages=True)]
    assert [place for page in pages for place in page.places] == places(dues)
    counts = [len(page.places) for page in pages]
    assert counts[0] == paging.FIRST_TEXTS
    assert rows / 2 < max(counts[1:]) <= rows


def test_a_damaged_record_is_left_out(small: Store, client: redis.Redis) -> None:
    small.schedule("q", [entry("a", 2000), entry("b", 2000)])
    client.hset("{q}:messages", "a", "damaged")
    assert met(small, Span("q")) == [Place(2000, b"b")]
