"""What every store does, seen through its methods alone."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from typing import Any

import pytest

from kombu_delayed.metrics import SPANS_MS, Metrics
from kombu_delayed.store import DeadLetter, Delivered, Entry, Limits, Scheduled, Size, Store
from kombu_delayed.testing import FakeStore, dump
from tests.contract.conftest import take_token
from tests.kit.state import entry, message, promoted, returned

LEASE_MS = 30_000


def deliver(store: Store, consumer: str = "A", want: int = 9, **options: Any) -> Delivered:
    answer = store.deliver("q", consumer, want, **{"tag": 1, "lease_ms": LEASE_MS, **options})
    assert answer is not None
    return answer


def texts(answer: Delivered) -> list[str]:
    return [record.decode()[1:] for record in answer.records]


def ack(store: Store, consumer: str, *tags: int) -> None:
    store.ack("q", consumer, tags, on_error=lambda: pytest.fail("an ack was refused"))


def test_published_is_delivered_in_order_and_once(store: Store) -> None:
    assert store.publish("q", [entry("a"), entry("b"), entry("c")]) == 3
    assert texts(deliver(store, want=2)) == [message("a"), message("b")]
    assert texts(deliver(store, tag=3)) == [message("c")]
    assert texts(deliver(store, tag=4)) == []


def test_urgent_messages_come_first(store: Store) -> None:
    store.publish("q", [entry("a", step=9), entry("b", step=3), entry("c")])
    assert deliver(store).records == [
        f"{step}{message(body)}".encode() for step, body in [(0, "c"), (3, "b"), (9, "a")]
    ]


def test_scheduled_waits_until_it_is_due(store: Store) -> None:
    entries = [entry("a", 3000), entry("b", 2000), entry("c", "+1500"), entry("d", 1000)]
    assert store.schedule("q", entries) == Scheduled(delayed=3, ready=1, already=0)
    assert texts(deliver(store)) == [message("d")]
    store.now = "2999"
    assert texts(deliver(store, tag=2)) == [
        promoted(message("b"), 2000),
        promoted(message("c"), 2500),
    ]
    store.now = "3000"
    assert texts(deliver(store, tag=4)) == [promoted(message("a"), 3000)]


def test_same_message_is_scheduled_once_and_another_with_its_id_too(store: Store) -> None:
    entries = [entry("a", 2000), entry("a", 2000), entry("a", 3000, body="other")]
    assert store.schedule("q", entries) == Scheduled(delayed=2, ready=0, already=1)
    store.now = "3000"
    assert len(deliver(store).records) == 2


def test_answer_says_when_to_come_back(store: Store) -> None:
    store.schedule("q", [entry("a", 2000)])
    store.publish("q", [entry("b"), entry("c")])
    assert deliver(store, want=1) == Delivered(1000, 2000, True, 1, [f"0{message('b')}".encode()])
    assert deliver(store, want=1, tag=2) == Delivered(
        1000, 2000, False, 1, [f"0{message('c')}".encode()]
    )
    assert deliver(store, "B") == Delivered(1000, 2000, False, 2, [])
    assert deliver(store, "A", leased=True) == Delivered(1000, 0, False, 2, [])
    assert deliver(store, "B", leased=True) == Delivered(1000, 2000, False, 2, [])


def test_turn_is_over_for_who_got_messages_and_not_alone(store: Store) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 3000)])
    assert [deliver(store, name).next_due_ms for name in "AB"] == [2000, 2000]
    store.now = "2000"
    assert deliver(store, "B", leased=True) == Delivered(
        2000, 0, False, 2, [f"0{promoted(message('a'), 2000)}".encode()]
    )
    assert deliver(store, "A", leased=True).next_due_ms == 3000
    assert deliver(store, "B", leased=True).next_due_ms == 0


def test_promotions_are_bounded(store: Store) -> None:
    store.schedule("q", [entry(str(n), 2000 + n) for n in range(5)])
    store.now = "3000"
    answers = [deliver(store, tag=10 * n, promotions=2) for n in range(1, 4)]
    assert [(len(answer.records), answer.more) for answer in answers] == [
        (2, True),
        (2, True),
        (1, False),
    ]


def test_acked_is_gone(store: Store) -> None:
    store.publish("q", [entry("a"), entry("b")])
    deliver(store)
    ack(store, "A", 1, 2, 99)
    ack(store, "A", 1)
    assert store.recover("q", "A", 0) == []
    store.leave("q", "A")
    assert store.size("q") == Size(0, 0, 0)


def test_released_behind_what_waits(store: Store) -> None:
    store.publish("q", [entry("a"), entry("b"), entry("c"), entry("d")])
    deliver(store, want=3)
    assert store.release("q", "A", [2, 1, 3], counted=True, behind=True) == 3
    assert texts(deliver(store, tag=10)) == [
        message("d"),
        *(returned(message(body), 1) for body in "bac"),
    ]


def test_released_is_next_again(store: Store) -> None:
    store.publish("q", [entry("a"), entry("b"), entry("c")])
    deliver(store, want=2)
    assert store.release("q", "A", [2, 1], counted=True) == 2
    assert store.release("q", "A", [2, 1]) == 0
    assert texts(deliver(store)) == [
        returned(message("a"), 1),
        returned(message("b"), 1),
        message("c"),
    ]


def test_leaving_gives_everything_back_uncounted(store: Store) -> None:
    store.publish("q", [entry("a"), entry("b")])
    deliver(store)
    store.leave("q", "A")
    answer = deliver(store, "B")
    assert texts(answer) == [returned(message("a"), 0), returned(message("b"), 0)]
    assert answer.consumers == 1


def test_leaving_passes_the_promise_on(store: Store) -> None:
    store.schedule("q", [entry("a", 2000)])
    assert deliver(store, "A").next_due_ms == 2000
    store.leave("q", "A")
    assert deliver(store, "B").next_due_ms == 2000


def test_messages_of_the_dead_are_reclaimed(store: Store) -> None:
    store.publish("q", [entry("a"), entry("b")])
    deliver(store, "A")
    deliver(store, "B")
    assert store.reclaim("q", "A") == 0
    store.now = str(1000 + LEASE_MS - 1)
    assert store.renew("q", "B", LEASE_MS) == []
    store.now = str(1000 + LEASE_MS)
    assert store.renew("q", "B", LEASE_MS) == ["A"]
    assert store.reclaim("q", "A") == 2
    assert texts(deliver(store, "B")) == [returned(message("a"), 1), returned(message("b"), 1)]


def next_end_ms(store: Store, consumer: str) -> int | None:
    return store.renew_all(["q"], [], consumer, LEASE_MS, LEASE_MS).next_end_ms


def test_when_the_next_lease_ends(store: Store) -> None:
    assert next_end_ms(store, "A") is None
    deliver(store, "A")
    assert next_end_ms(store, "A") is None
    store.now = "1500"
    deliver(store, "B")
    deliver(store, "C")
    assert next_end_ms(store, "A") == 1500 + LEASE_MS
    assert next_end_ms(store, "B") == 1000 + LEASE_MS
    store.now = str(1000 + LEASE_MS)
    assert next_end_ms(store, "B") == 1500 + LEASE_MS


def test_how_long_a_lease_lasts_is_up_to_what_is_held(store: Store) -> None:
    store.publish("q", [entry("a")])
    deliver(store, "A")
    deliver(store, "B")
    found = store.renew_all(["q"], ["q"], "B", LEASE_MS, 3 * LEASE_MS)
    assert (found.idle, found.lost, found.own_end_ms) == ({"q"}, [], 1000 + LEASE_MS)
    found = store.renew_all(["q"], ["q"], "A", LEASE_MS, 3 * LEASE_MS)
    assert (found.idle, found.others) == (set(), [])
    assert {name: left for name, left, _ in store.consumers("q")} == {
        "A": LEASE_MS,
        "B": 3 * LEASE_MS,
    }
    deliver(store, "B")  # there is nothing to take, so it holds nothing
    assert next_end_ms(store, "A") == 1000 + 3 * LEASE_MS
    store.publish("q", [entry("b")])
    deliver(store, "B")
    assert next_end_ms(store, "A") == 1000 + LEASE_MS


def test_who_has_renewed_is_not_reclaimed(store: Store) -> None:
    store.publish("q", [entry("a")])
    deliver(store, "A")
    store.now = str(1000 + LEASE_MS)
    (found,) = store.renew_all(["q"], [], "B", LEASE_MS, LEASE_MS).others
    assert found == ("q", "A", 1000 + LEASE_MS)
    assert store.renew("q", "A", LEASE_MS) == []
    assert store.reclaim("q", "A", found.end_ms) == 0
    assert store.reclaim("q", "A", 1000 + 2 * LEASE_MS) == 1


def test_who_was_reclaimed_finds_out(store: Store) -> None:
    store.publish("q", [entry("a")])
    deliver(store, "A")
    store.now = str(1000 + LEASE_MS)
    store.reclaim("q", "A")
    assert store.renew("q", "A", LEASE_MS) is None
    assert store.deliver("q", "A", 1, 2, lease_ms=LEASE_MS, leased=True) is None
    assert store.release("q", "A", [1]) == 0
    ack(store, "A", 1)
    assert store.size("q") == Size(ready=1, due=0, delayed=0)


def test_taken_without_a_lease_is_gone(store: Store) -> None:
    store.publish("q", [entry("a")])
    answer = deliver(store, lease_ms=0)
    assert (texts(answer), answer.consumers) == ([message("a")], 0)
    assert store.recover("q", "A", 0) == []


def test_lost_answer_is_recovered(store: Store) -> None:
    store.publish("q", [entry("a"), entry("b", step=3), entry("c", step=3)])
    deliver(store, tag=9)
    assert store.recover("q", "A", 9) == [
        (10, f"3{message('b')}".encode()),
        (11, f"3{message('c')}".encode()),
    ]


def test_parked_waits_again(store: Store) -> None:
    store.publish("q", [entry("a"), entry("b")])
    deliver(store)
    assert store.park("q", "A", [(1, "a", 2000), (99, "x", 2000)]) == 1
    assert store.size("q") == Size(ready=0, due=0, delayed=1)
    store.now = "2000"
    assert texts(deliver(store, tag=3)) == [promoted(message("a"), 2000)]


def test_buried_never_comes_back(store: Store) -> None:
    store.publish("q", [entry("a"), entry("b")])
    deliver(store)
    assert store.bury("q", "A", [(tag, "a", "{}", b"") for tag in (1, 2, 99)]) == 2
    store.leave("q", "A")
    assert store.size("q") == Size(0, 0, 0)
    assert store.purge("q") == 0


def bury(store: Store, *ids: str) -> None:
    """Publish messages, and bury them as `A`."""
    store.publish("q", [entry(id) for id in ids])
    assert len(deliver(store, tag=500).records) == len(ids)
    entries = [(tag, id, "rejected", b"") for tag, id in enumerate(ids, 500)]
    assert store.bury("q", "A", entries) == len(ids)


def test_dead_letters_are_listed_oldest_first(store: Store) -> None:
    assert (store.dead_count("q"), store.dead_ids("q"), store.dead_letters("q", [])) == (0, [], [])
    for now, id in (("1000", "b"), ("1002", "a"), ("1001", "c")):
        store.now = now
        bury(store, id)
    assert store.dead_count("q") == 3
    assert store.dead_ids("q") == ["b", "c", "a"]
    assert [store.dead_ids("q", start, 2) for start in (0, 1, 2, 3)] == [
        ["b", "c"],
        ["c", "a"],
        ["a"],
        [],
    ]
    assert store.dead_letters("q", ["c", "missing", "b"]) == [
        DeadLetter("c", message("c").encode(), "rejected", "A", 1001, 1),
        DeadLetter("b", message("b").encode(), "rejected", "A", 1000, 1),
    ]
    assert store.dead_count("other") == 0


def test_dead_letters_behind_a_place(store: Store) -> None:
    for now, id in (("1000", "b"), ("1002", "a"), ("1001", "c"), ("1001", "d"), ("1001", "Z")):
        store.now = now
        bury(store, id)
    order = [(1000, "b"), (1001, "Z"), (1001, "c"), (1001, "d"), (1002, "a")]
    assert store.dead_page("q") == order
    for n, place in enumerate(order):
        assert store.dead_page("q", place, 2) == order[n + 1 : n + 3]
    assert store.purge_dead("q", ["c", "b"]) == 2
    assert store.dead_page("q", (1001, "c")) == [(1001, "d"), (1002, "a")]
    assert store.dead_page("q", (1000, "b"), 1) == [(1001, "Z")]
    assert store.dead_page("q", (1002, "a")) == []
    assert store.dead_page("other") == []


def test_names_of_consumers_that_are_no_text(store: Store) -> None:
    name, living = b"w@\xff:1".decode(errors="surrogateescape"), "w:2"
    store.publish("q", [entry("a")])
    deliver(store, name)
    assert [(each, held) for each, _, held in store.consumers("q")] == [(name, 1)]
    assert deliver(store, living, tag=2).consumers == 2
    assert next_end_ms(store, living) == 1000 + LEASE_MS
    store.now = str(1000 + LEASE_MS - 1)
    assert store.renew("q", living, LEASE_MS) == []
    store.now = str(1000 + LEASE_MS)
    assert store.renew("q", living, LEASE_MS) == [name]
    assert store.reclaim("q", name) == 1
    assert [each for each, _, _ in store.consumers("q")] == [living]


@pytest.mark.parametrize("reason", ['"quoted" \\ back', "line\nbreak", "ü 中", "a/b", "", "\x00"])
def test_reason_is_kept(reason: str, store: Store) -> None:
    assert store.bury("q", "host ü:1", [(1, "a", reason, b"6\xff is not text")]) == 1
    assert store.dead_letters("q", store.dead_ids("q")) == [
        DeadLetter("a", b"\xff is not text", reason, "host ü:1", 1000, 1)
    ]


@pytest.mark.parametrize("way", ["release", "reclaim"])
def test_delivered_too_often_is_dead(way: str, store: Store) -> None:
    store.limits = Limits(max_deliveries=2)
    store.publish("q", [entry("a")])
    for attempt in (1, 2):
        deliver(store, tag=attempt, lease_ms=100)
        assert store.dead_count("q") == 0
        if way == "reclaim":
            store.now = str(1000 + 100 * attempt)
            assert store.reclaim("q", "A") == 1
        else:
            assert store.release("q", "A", [attempt], counted=True) == 1
    assert store.size("q") == Size(0, 0, 0)
    (dead,) = store.dead_letters("q", store.dead_ids("q"))
    assert dead.message.decode() == returned(message("a"), 1)
    assert (dead.reason, dead.consumer, dead.at_ms, dead.deliveries) == (
        "delivered 2 times without success",
        "A",
        int(store.now),
        2,
    )


def test_orderly_end_is_no_attempt(store: Store) -> None:
    store.limits = Limits(max_deliveries=1)
    store.publish("q", [entry("a")])
    for tag in range(5):
        deliver(store, tag=tag)
        if tag % 2:
            store.leave("q", "A")
        else:
            store.release("q", "A", [tag])
    assert (store.dead_count("q"), store.size("q").ready) == (0, 1)


def test_replayed_gets_another_try(store: Store) -> None:
    store.limits = Limits(max_deliveries=2)
    bury(store, "a", "b", "c")
    assert store.replay("q", ["c", "missing", "a"]) == 2
    assert store.replay("q", ["c"]) == 0
    assert store.dead_ids("q") == ["b"]
    assert texts(deliver(store)) == [message("c"), message("a")]
    store.release("q", "A", [1], counted=True)
    assert texts(deliver(store, tag=3)) == [returned(message("c"), 1)]


def test_dead_letters_may_share_an_id(store: Store) -> None:
    for now, id in (("1000", "a"), ("1001", "b"), ("1002", "a")):
        store.now = now
        bury(store, id)
    first, other, second = store.dead_ids("q")
    assert (first, other) == ("a", "b")
    assert store.replay("q", [second], 2000) == 1
    assert [each["id"] for each in dump(store, "q")["delayed"]] == ["a"]
    assert second == "a\x1f3"


def test_replayed_later_waits(store: Store) -> None:
    bury(store, "a", "b")
    assert store.replay("q", ["a"], 2000) == 1
    assert store.size("q") == Size(ready=0, due=0, delayed=1)
    assert deliver(store).next_due_ms == 2000
    store.now = "2000"
    assert texts(deliver(store)) == [promoted(message("a"), 2000)]
    assert store.replay("q", ["b"], 1500) == 1
    assert texts(deliver(store, tag=2)) == [promoted(message("b"), 1500)]


def test_purged_dead_letters_are_gone(store: Store) -> None:
    bury(store, "a", "b", "c")
    assert store.purge_dead("q", ["a", "c", "missing"]) == 2
    assert store.dead_ids("q") == ["b"]
    assert store.dead_letters("q", ["a", "b", "c"]) == store.dead_letters("q", ["b"])
    assert store.replay("q", ["a", "c"]) == 0
    assert (store.purge_dead("q", []), store.purge_dead("q", ["a"])) == (0, 0)


def test_any_number_of_dead_letters(store: Store) -> None:
    ids = [f"{n:04}" for n in range(600)]
    for at in range(0, 600, 200):
        store.bury("q", "A", [(1, id, "rejected", b"0{}") for id in ids[at : at + 200]])
    assert store.dead_ids("q", count=1000) == ids
    assert store.replay("q", ids[:300]) == 300
    assert store.purge_dead("q", ids) == 300
    assert (store.dead_count("q"), store.size("q").ready) == (0, 300)


def test_purge_leaves_the_dead(store: Store) -> None:
    bury(store, "a")
    assert [store.purge("q"), store.delete("q"), store.dead_count("q")] == [0, 0, 1]


@pytest.mark.parametrize(("limit", "left"), [(1, "e"), (2, "de"), (4, "bcde"), (5, "abcde")])
def test_dead_letters_are_bounded_by_count(limit: int, left: str, store: Store) -> None:
    store.limits = Limits(dead_limit=limit)
    for now, id in enumerate("abcde", 1000):
        store.now = str(now)
        bury(store, id)
        assert store.dead_count("q") == min(now - 999, limit)
    assert store.dead_ids("q") == list(left)
    assert len(store.dead_letters("q", list("abcde"))) == len(left)


def test_dead_letters_are_bounded_by_age(store: Store) -> None:
    store.limits = Limits(dead_seconds=60)
    for now, id in ((1000, "a"), (2000, "b"), (61_000, "c"), (61_999, "d")):
        store.now = str(now)
        bury(store, id)
    assert store.dead_ids("q") == ["b", "c", "d"]
    assert len(store.dead_letters("q", list("abcd"))) == 3


def test_size_counts_by_state(store: Store) -> None:
    store.publish("q", [entry("a"), entry("b", step=3)])
    store.schedule("q", [entry("c", 2000), entry("d", 3000)])
    store.now = "2000"
    assert store.size("q") == Size(ready=2, due=1, delayed=2)
    assert store.size("other") == Size(0, 0, 0)


NOTHING = Metrics(0, 0, 0, 0, 0, 0, 0.0, None, 0, 0, 0, False)


def test_metrics_of_no_queue(store: Store) -> None:
    assert store.metrics("q") == NOTHING


def test_metrics_count_by_state(store: Store) -> None:
    store.publish("q", [entry(n) for n in "abcdef"])
    deliver(store, "A", want=3)
    deliver(store, "B", want=2, lease_ms=500)
    store.bury("q", "A", [(1, "dead", "why", b"")])
    counts = replace(NOTHING, ready=1, unacked=4, dead=1)
    assert store.metrics("q") == replace(counts, consumers=2)
    store.now = "1500"
    assert store.metrics("q") == replace(counts, consumers=1)
    store.now = "90000"
    assert store.metrics("q") == replace(counts, consumers=0)


DAY_MS = 86_400_000


@pytest.mark.parametrize(
    ("now_ms", "expected"),
    [
        (1_000, {"next_due_seconds": 1.0, "due_within_minute": 1}),
        (1_999, {"next_due_seconds": 0.001, "due_within_minute": 1}),
        (2_000, {"due": 1, "next_due_seconds": 60.0, "due_within_minute": 1}),
        (5_000, {"due": 1, "oldest_due_seconds": 3.0, "next_due_seconds": 57.0}),
        (62_000, {"due": 2, "oldest_due_seconds": 60.0, "next_due_seconds": 3_540.0}),
        (2 * DAY_MS, {"due": 4, "oldest_due_seconds": 2 * 86_400.0 - 2}),
    ],
)
def test_metrics_of_what_is_delayed(now_ms: int, expected: dict[str, Any], store: Store) -> None:
    due_times = (2_000, 62_000, 3_602_000, DAY_MS + 2_000)
    store.schedule("q", [entry(str(at_ms), at_ms) for at_ms in due_times])
    store.now = str(now_ms)
    found = store.metrics("q")
    assert {name: getattr(found, name) for name in expected} == expected
    within = (found.due_within_minute, found.due_within_hour, found.due_within_day)
    assert within == tuple(
        sum(now_ms < at_ms <= now_ms + span_ms for at_ms in due_times) for span_ms in SPANS_MS
    )
    assert replace(found, delayed=0, **dict.fromkeys(CHECKED, 0), next_due_seconds=None) == NOTHING


CHECKED = ("due", "oldest_due_seconds", "due_within_minute", "due_within_hour", "due_within_day")


def test_what_was_promoted_is_late_until_a_consumer_has_it(store: Store) -> None:
    store.schedule("q", [entry("a", 2_000), entry("b", 3_000), entry("c", 9_000, step=3)])
    store.now = "10000"
    assert store.metrics("q").oldest_due_seconds == 8.0
    deliver(store, want=1)
    found = store.metrics("q")
    assert (found.delayed, found.ready, found.oldest_due_seconds) == (0, 2, 7.0)
    deliver(store, want=1, tag=2)
    assert store.metrics("q").oldest_due_seconds == 1.0
    store.release("q", "A", [1], counted=True)
    assert store.metrics("q").oldest_due_seconds == 8.0
    deliver(store, tag=3)
    assert store.metrics("q").oldest_due_seconds == 0.0


@pytest.mark.parametrize(
    ("conflict", "due", "answer", "left"),
    [
        ("refuse", 3000, ("refused", "a"), {"a": (2000, "a")}),
        ("replace", 3000, ("replaced", "a"), {"b": (3000, "b")}),
        ("debounce", 3000, ("pushed", "a"), {"a": (3000, "a")}),
        ("replace", 900, ("replaced", "a"), {}),
        ("debounce", 900, ("pushed", "a"), {}),
    ],
)
def test_unique(
    conflict: str,
    due: int,
    answer: tuple[str, str],
    left: dict[str, tuple[int, str]],
    store: Store,
) -> None:
    assert store.schedule_unique("q", entry("a", 2000), "key", conflict) == ("stored", "")
    assert store.schedule_unique("q", entry("a", 2000), "key", conflict) == ("stored", "")
    assert store.schedule_unique("q", entry("b", due), "key", conflict) == answer
    found = dump(store, "q")
    assert {
        each["id"]: (each["due_ms"], json.loads(each["message"])["body"])
        for each in found["delayed"]
    } == left
    assert list(found["unique"].items()) == [("key", id) for id in left]
    assert len(found["ready"]) == (due < 1000)


def test_key_is_free_when_its_message_has_left(store: Store) -> None:
    store.schedule_unique("q", entry("a", 2000), "key", "refuse")
    store.now = "2000"
    deliver(store)
    assert store.schedule_unique("q", entry("b", 3000), "key", "refuse") == ("stored", "")


@pytest.mark.parametrize("verb", ["purge", "delete"])
def test_purge_and_delete_count_what_they_drop(verb: str, store: Store) -> None:
    store.publish("q", [entry("a"), entry("b")])
    store.schedule("q", [entry("c", 2000), entry("d", 3000)])
    store.publish("other", [entry("a")])
    deliver(store, want=1)
    assert getattr(store, verb)("q") == 3
    assert getattr(store, verb)("q") == 0
    assert store.size("other").ready == 1
    assert [tag for tag, _ in store.recover("q", "A", 0)] == [1]


def test_announcing_changes_no_message(store: Store) -> None:
    store.publish("q", [entry("a")])
    store.schedule("q", [entry("b", 2000)])
    store.announce("q")
    assert store.size("q") == Size(ready=1, due=0, delayed=1)
    assert deliver(store).next_due_ms == 2000


@pytest.mark.parametrize(
    "text", ['{"a":[],"properties":{}}', '{"body":"\\u00fc ü","properties":{}}']
)
def test_text_is_kept_to_the_byte(text: str, store: Store) -> None:
    store.publish("q", [Entry("a", 0, text)])
    assert texts(deliver(store, lease_ms=0)) == [text]
    store.schedule("q", [Entry("a", 0, text, "2000")])
    store.now = "2000"
    assert texts(deliver(store, lease_ms=0)) == [promoted(text, 2000)]


# Who consumes.


def test_consumers_are_listed_by_the_end_of_their_leases(store: Store) -> None:
    assert store.consumers("q") == []
    store.publish("q", [entry("a"), entry("b"), entry("c")])
    deliver(store, "B", want=2)
    deliver(store, "A", want=1, lease_ms=100)
    assert store.consumers("q") == [("A", 100, 1), ("B", LEASE_MS, 2)]
    store.now = "1100"
    assert store.consumers("q") == [("A", 0, 1), ("B", LEASE_MS - 100, 2)]
    store.now = "1200"
    assert store.consumers("q")[0] == ("A", -1, 1)
    store.reclaim("q", "A")
    store.leave("q", "B")
    assert store.consumers("q") == []


# Wake tokens: lua/README.md, invariants 5 and 6.


def tokens(store: Store) -> dict[str, int]:
    return dump(store, "q")["wake"]


def test_what_is_ready_has_a_token(store: Store) -> None:
    store.publish("q", [entry("a")])
    assert tokens(store) == {"now": 0}
    deliver(store, "A", want=0)
    assert tokens(store) == {"now": 0}
    deliver(store, "A", want=1)
    assert tokens(store) == {}
    store.release("q", "A", [1])
    assert tokens(store) == {"now": 0}


def test_token_is_as_early_as_the_earliest_due_time(store: Store) -> None:
    assert take_token(store) is None
    store.schedule("q", [entry("a", 3000), entry("b", 4000)])
    assert tokens(store) == {"due": 3000}
    store.schedule("q", [entry("c", 5000)])
    assert tokens(store) == {"due": 3000}
    store.schedule("q", [entry("d", 2000)])
    assert tokens(store) == {"due": 2000}
    store.publish("q", [entry("e")])
    assert [take_token(store) for _ in range(3)] == [("now", 0), ("due", 2000), None]


def test_later_message_wakes_nobody(store: Store) -> None:
    store.schedule("q", [entry("a", 3000)])
    assert take_token(store) == ("due", 3000)
    store.schedule("q", [entry("b", 3000)])
    assert tokens(store) == {}
    store.schedule("q", [entry("c", 2999)])
    assert tokens(store) == {"due": 2999}


def test_promise_of_one_is_kept_by_another(store: Store) -> None:
    store.schedule("q", [entry("a", 2000)])
    assert take_token(store) == ("due", 2000)
    assert deliver(store, "A").next_due_ms == 2000
    assert (tokens(store), dump(store, "q")["armed"]) == ({}, "2000 A")
    store.announce("q")
    assert (tokens(store), dump(store, "q")["armed"]) == ({"due": 2000}, "")


@pytest.mark.parametrize("verb", ["leave", "reclaim"])
def test_who_goes_leaves_tokens(verb: str, store: Store) -> None:
    store.publish("q", [entry("a")])
    store.schedule("q", [entry("b", 99_000)])
    deliver(store, "A")
    while take_token(store):
        pass
    store.now = str(1000 + LEASE_MS)
    getattr(store, verb)("q", "A")
    assert (tokens(store), dump(store, "q")["armed"]) == ({"now": 0, "due": 99_000}, "")


def test_parked_and_replayed_have_tokens(store: Store) -> None:
    store.publish("q", [entry("a")])
    deliver(store, waits=False)
    store.park("q", "A", [(1, "a", 3000)])
    assert tokens(store) == {"due": 3000}
    bury(store, "b", "c")
    store.replay("q", ["b"], 2000)
    assert tokens(store) == {"due": 2000}
    store.replay("q", ["c"])
    assert tokens(store) == {"due": 2000, "now": 0}


@pytest.mark.parametrize("verb", ["purge", "delete"])
def test_nothing_left_has_no_token(verb: str, store: Store) -> None:
    store.publish("q", [entry("a")])
    store.schedule("q", [entry("b", 2000)])
    getattr(store, verb)("q")
    assert tokens(store) == {}


def test_deleted_queue_is_nobodys_promise(store: Store) -> None:
    store.schedule("q", [entry("a", 2000)])
    deliver(store)
    store.purge("q")
    assert dump(store, "q")["armed"] == "2000 A"
    store.delete("q")
    assert dump(store, "q")["armed"] == ""


@pytest.mark.parametrize("now", ["", "+3600000"])
def test_time_goes_by_the_clock_and_may_be_ahead_of_it(now: str, store: Store) -> None:
    store.now = now
    assert store.schedule("q", [entry("a", "+60000")]).delayed == 1
    (waiting,) = dump(store, "q")["delayed"]
    store.now = f"+{int(now or 0) + 59_000}"
    assert store.size("q").due == 0
    store.now = f"+{int(now or 0) + 60_000}"
    assert store.size("q").due == 1
    assert texts(deliver(store)) == [promoted(message("a"), waiting["due_ms"])]


#: Of the real one, for who works on it or sends calls in a pipeline.
INSIDES = {"hang_up", "over", "schedule_call", "publish_call", "cancel_call", "restore_call"}
INSIDES |= {"backlog_keys", "event_bound", "event_keys", "queue_with", "send"}
#: Of many queues at once.
INSIDES |= {"deliver_call", "together", "look", "count_keys"}
INSIDES |= {"announce_soon", "announce_all", "leave_all", "recover_all"}


def test_the_fake_has_all_methods_of_the_real_one() -> None:
    def methods(kind: type) -> dict[str, inspect.Signature]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: inspect.signature(each) for name, each in found if name[0] != "_"}

    real = methods(Store)
    fake = methods(FakeStore)
    assert {name: fake[name] for name in real.keys() - INSIDES} == {
        name: real[name] for name in real.keys() - INSIDES
    }
