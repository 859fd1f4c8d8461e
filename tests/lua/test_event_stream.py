"""The events that each move writes to the stream of lifecycle events."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import redis

from kombu_delayed.errors import DelayedError
from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.inspection.events import Event, newest, read
from kombu_delayed.message.envelope import to_json
from kombu_delayed.message.wait import Wait
from kombu_delayed.store.calls import caller, instrumentation
from kombu_delayed.store.calls.caller import TRIM_CALLS
from kombu_delayed.store.store import Entry, Limits, Store
from tests.kit import claims
from tests.kit.state import all_keys
from tests.kit.wait import wait_until

CONSUMER = "w1@host:7:abcd"


@pytest.fixture(autouse=True)
def _events(store: Store) -> None:
    store.event_limit = 1000


def task(id: str, due: int | str = "", **headers: Any) -> Entry:
    """A message like Celery's whose body looks like headers."""
    headers = {"lang": "py", "task": "mail.send", "id": id, **headers}
    body = json.dumps({"id": "no", "task": "no", "tenant": "no"})
    content = {"body": body, "headers": headers, "properties": {"delivery_tag": "tag"}}
    return Entry(id, 0, to_json(content), str(due))


def told(store: Store) -> list[tuple[Any, ...]]:
    found = read(store, "q")
    assert all(event.queue == "q" for event in found)
    return [(event.event, event.id, event.due_ms, event.deliveries) for event in found]


def deliver(store: Store, consumer: str = CONSUMER, tag: int = 1) -> None:
    store.deliver("q", consumer, 10, tag, lease_ms=30_000)


def ack(store: Store, *tags: int) -> None:
    claims.ack(store, *tags, consumer=CONSUMER)


def test_the_life_of_a_delayed_message(store: Store) -> None:
    store.schedule("q", [task("a", 2000, tenant="acme")])
    Backlog(store, "q").reschedule([Move("a", "3000", "2000-01-01T00:00:00+00:00")])
    store.now = "3000"
    deliver(store)
    ack(store, 1)
    assert told(store) == [
        ("scheduled", "a", 2000, 0),
        ("rescheduled", "a", 3000, 0),
        ("delivered", "a", 3000, 0),
        ("acked", "a", 3000, 0),
    ]
    found = read(store, "q")
    assert {(event.task, event.tenant) for event in found} == {("mail.send", "acme")}
    assert [event.consumer for event in found] == ["", "", CONSUMER, CONSUMER]
    assert found[-1].worker == "w1@host"
    server_ms = int(store.run("TIME")[0]) * 1000
    assert all(abs(event.at_ms - server_ms) < 60_000 for event in found)


def test_a_message_that_is_changed(store: Store) -> None:
    store.schedule("q", [task("a", 2000)])
    backlog = Backlog(store, "q")
    [read] = backlog.get("a")
    assert backlog.revise(read, 0, read.kept.message, 3000)
    assert told(store)[1:] == [("rescheduled", "a", 3000, 0)]


def test_attempts(store: Store) -> None:
    store.publish("q", [task("a")])
    deliver(store)
    store.release("q", CONSUMER, [1], counted=True)
    deliver(store, tag=2)
    store.now = "40000"
    store.leases.reclaim("q", CONSUMER)
    deliver(store, "other")
    store.leases.leave("q", "other")
    assert told(store) == [
        ("delivered", "a", None, 0),
        ("released", "a", None, 1),
        ("delivered", "a", None, 1),
        ("reclaimed", "a", None, 2),
        ("delivered", "a", None, 2),
        ("released", "a", None, 2),
    ]
    assert [event.consumer for event in read(store, "q")] == [CONSUMER] * 4 + ["other"] * 2


def test_ends(store: Store) -> None:
    store.limits = Limits(max_deliveries=1)
    store.schedule("q", [task("a", 2000), task("b", 2000), task("c", 5000), task("c", 6000, n=1)])
    store.now = "3000"
    deliver(store)
    store.bury("q", CONSUMER, [(1, "a", "rejected", b"")])
    store.release("q", CONSUMER, [2], counted=True)
    store.dead.replay("q", ["a"])
    store.dead.replay("q", ["b"], 9000)
    Backlog(store, "q").cancel(["c", "nobody"])
    assert told(store)[4:] == [
        ("delivered", "a", 2000, 0),
        ("delivered", "b", 2000, 0),
        ("buried", "a", 2000, 1),
        ("buried", "b", 2000, 1),
        ("replayed", "a", 2000, 0),
        ("replayed", "b", 9000, 0),
        ("cancelled", "c", 6000, 0),
        ("cancelled", "c", 5000, 0),
    ]
    reasons = [event.reason for event in read(store, "q") if event.event == "buried"]
    assert reasons == ["rejected", "delivered 1 times without success"]


def test_what_a_stock_producer_sent_too_early_is_scheduled_by_whom_it_meets(store: Store) -> None:
    store.publish("q", [task("a"), task("a")])
    deliver(store)
    store.park("q", CONSUMER, [(1, "a", 8000), (2, "a", 8000)])
    assert told(store)[2:] == [("scheduled", "a", 8000, 0)]
    assert newest(store, "q")[0].consumer == CONSUMER


def test_a_message_that_cannot_be_read_is_buried_under_its_own_id(store: Store) -> None:
    store.publish("q", [task("a"), Entry("b", 0, "no JSON")])
    deliver(store)
    store.bury("q", CONSUMER, [(1, "chance", "bad", b""), (2, "chance2", "bad", b"")])
    assert told(store)[2:] == [("buried", "a", None, 1), ("buried", "chance2", None, 1)]
    store.dead.replay("q", ["chance", "chance2"])
    assert told(store)[4:] == [("replayed", "a", None, 0), ("replayed", "chance2", None, 0)]


@pytest.mark.parametrize(
    ("conflict", "due", "then"),
    [
        ("refuse", 3000, []),
        ("replace", 3000, [("cancelled", "a", 2000, 0), ("scheduled", "b", 3000, 0)]),
        ("debounce", 3000, [("rescheduled", "a", 3000, 0)]),
        ("debounce", 500, [("rescheduled", "a", 500, 0)]),
        ("replace", 500, [("cancelled", "a", 2000, 0)]),
        ("retry", 3000, [("scheduled", "b", 3000, 0)]),
        ("retry", 500, []),
    ],
)
def test_unique(conflict: str, due: int, then: list[Any], store: Store) -> None:
    store.schedule_unique("q", task("a", 2000), "k", "refuse")
    store.schedule_unique("q", task("b", due), "k", conflict)
    assert told(store) == [("scheduled", "a", 2000, 0), *then]


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ({}, ""),
        ({"tenant": None}, ""),
        ({"tenant": 7}, "7"),
        ({"tenant": 'say "hi"\\'}, 'say "hi"\\'),
        ({"tenant": {"a": 1}}, ""),
        ({"ctx": {"tenant": "inner"}, "tenant": "outer"}, "outer"),
        ({"kwargsrepr": "{'a': {\"tenant\": 1}}", "stamps": {}, "tenant": "outer"}, "outer"),
        ({"note": '{"tenant": "inner"}', "tenant": "outer"}, "outer"),
        ({"tenant": "a\\\\"}, "a\\\\"),
    ],
)
def test_tenants(headers: dict[str, Any], tenant: str, store: Store) -> None:
    store.schedule("q", [task("a", 2000, **headers)])
    (event,) = read(store, "q")
    assert event.tenant == tenant


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ('{"headers": {"id": "h"}, "properties": {"message_id": "m"}}', "h"),
        ('{"properties": {"message_id": "m", "delivery_tag": "t"}}', "m"),
        ('{"properties": {"delivery_tag": "t"}}', "t"),
        ('{"headers": {"job": {"id": 5}}, "properties": {"delivery_tag": "t"}}', "t"),
        ('{"headers": null, "properties": {"delivery_tag": "t"}}', "t"),
        ('{"headers": {"id": 5}, "properties": {}}', "5"),
        ('{"headers": {"id": "\\u00e9\\""}, "properties": {}}', '\u00e9"'),
        ("no JSON at all", ""),
        ('{"headers": "\\\\"id\\\\": "', ""),
    ],
)
def test_ids_of_all_kinds_of_messages(text: str, id: str, store: Store) -> None:
    store.publish("q", [Entry("a", 0, text)])
    deliver(store)
    (event,) = read(store, "q")
    assert event.id == id
    store.release("q", CONSUMER, [1])
    assert len(read(store, "q")) == 2


def test_the_format(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [task("a", 2000)])
    ((_, fields),) = client.xrange("{q}:events")  # type: ignore[misc]
    assert list(fields.items()) == [
        (b"v", b"2"),
        (b"event", b'["scheduled","a","mail.send","",2000,"",0]'),
    ]


@pytest.mark.parametrize("reason", ['say "no"', "back\\slash", "a\nb", "caf\u00e9", "[1]", ""])
def test_reasons_of_all_kinds(reason: str, store: Store) -> None:
    store.publish("q", [task("a"), task("b"), task("c")])
    deliver(store)
    store.bury("q", CONSUMER, [(1, "a", reason, b"")])
    store.drop("q", CONSUMER, 2, reason)
    store.park("q", CONSUMER, [(3, "c", 9000)], Wait(2000, reason))
    found = newest(store, "q", 3)
    assert [(event.event, event.reason) for event in found] == [
        ("buried", reason),
        ("dropped", reason),
        ("scheduled", reason),
    ]


@pytest.mark.parametrize(("digits", "due_ms"), [("0", 0), ("007", 7), ("9" * 400, 2**53)])
def test_due_times_of_all_kinds(digits: str, due_ms: int, store: Store) -> None:
    store.publish("q", [Entry("a", 0, f'{{"due_ms":{digits},"headers":{{"id":"a"}}}}')])
    deliver(store)
    assert told(store) == [("delivered", "a", due_ms, 0)]


def test_nothing_is_told_unless_asked(store: Store, client: redis.Redis) -> None:
    store.event_limit = 0
    store.schedule("q", [task("a", 2000)])
    store.now = "3000"
    deliver(store)
    ack(store, 1)
    assert not client.exists("{q}:events")


def test_the_stream_has_a_bound(store: Store) -> None:
    store.event_limit = 200
    for n in range(1000):
        store.schedule("q", [task(f"{n}", 2000)])
    kept = read(store, "q")
    assert 200 <= len(kept) <= 300
    assert [event.id for event in newest(store, "q", 2)] == ["998", "999"]
    assert read(store, "q", kept[-2].stream_id) == kept[-1:]


def test_events_of_a_queue_that_expires_go_with_it(store: Store, client: redis.Redis) -> None:
    store.publish("q", [task("a")], 60_000)
    store.deliver("q", CONSUMER, 1, 1, lease_ms=30_000, expires_ms=60_000)
    assert 0 < client.pttl("{q}:events") <= 60_000  # type: ignore[operator]


def test_events_of_a_queue_that_nobody_uses_go(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call in many extends the life of the stream, and so does each that recreates it."""
    monkeypatch.setattr(caller, "TRIM_SECONDS", math.inf)
    store.schedule("q", [task("0", 2000), task("1", 2000)])
    days = client.pttl("{q}:events") / 86_400_000  # type: ignore[operator]
    assert 6.9 < days <= 7
    client.persist("{q}:events")
    for n in range(1, TRIM_CALLS):
        store.schedule("q", [task(f"{n}", 3000)])
    assert client.pttl("{q}:events") == -1
    store.schedule("q", [task(f"{TRIM_CALLS}", 2000)])
    assert client.pttl("{q}:events") > 0  # type: ignore[operator]
    client.delete("{q}:events")
    Backlog(store, "q").cancel(["0"])
    assert told(store) == [("cancelled", "0", 2000, 0)]
    assert client.pttl("{q}:events") > 0  # type: ignore[operator]
    store.delete("q")
    assert client.keys("*") == []


def test_another_key_in_the_streams_place_stops_no_move(store: Store, client: redis.Redis) -> None:
    client.set("{q}:events", "mine")
    store.schedule("q", [task("a", 500)])
    deliver(store)
    ack(store, 1)
    assert all_keys(client) == ["{q}:consumers"]


def test_acks_of_a_server_that_has_lost_its_scripts(store: Store, client: redis.Redis) -> None:
    failed: list[int] = []
    store.publish("q", [task(f"{n}") for n in range(3)])
    deliver(store)
    ack(store, 1)
    client.script_flush()
    store.ack("q", CONSUMER, [2], lambda: failed.append(2))
    store.run("PING")  # an ack does not wait, but the next command does
    assert failed == [2]
    ack(store, 2, 3)
    assert [event.id for event in newest(store, "q", 3)] == ["0", "1", "2"]
    assert all_keys(client) == ["{q}:consumers"]


def test_burials_are_told_to_who_listens(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.limits = Limits(max_deliveries=1)
    store.publish("q", [task("a"), task("b"), task("c"), task("c")])
    deliver(store)
    heard: list[Any] = []
    monkeypatch.setattr(instrumentation, "burial_listeners", [lambda *given: heard.append(given)])
    store.bury("q", CONSUMER, [(1, "a", "rejected", b""), (9, "z", "rejected", b"")])
    store.release("q", CONSUMER, [2], counted=True)
    store.release("q", CONSUMER, [9])
    store.now = "40000"
    store.leases.reclaim("q", CONSUMER)
    wait_until(lambda: len(heard) == 3, "all is told")
    assert heard == [(store, "q", ["a"]), (store, "q", ["b"]), (store, "q", ["c", "c\x1f4"])]
    assert len(store.dead.letters("q", ["a", "b", "c", "c\x1f4"])) == 4


def test_an_event_of_a_later_version_is_refused() -> None:
    with pytest.raises(DelayedError, match=r"'q' has version '4', but this program knows 2 and 3"):
        Event.of("q", [b"7-0", [b"v", b"4", b"what", b"else"]])
