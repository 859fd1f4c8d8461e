"""Large backlogs keep messages of Celery's tasks without the parts they have in common."""

from __future__ import annotations

import json
import random

import pytest
import redis

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.message.envelope import open_kept
from kombu_delayed.message.packing import pack
from kombu_delayed.message.ticket import Gate, Ticket, put_ticket
from kombu_delayed.store.store import Entry, Store
from tests.kit.claims import deliver
from tests.kit.compressed import BYTES, kept
from tests.kit.state import promoted
from tests.kit.task_texts import ID, TASKS, damaged, task

KEY = "{q}:messages"
BEFORE_1970 = "-62135596800000"


@pytest.fixture
def store(store: Store) -> Store:
    """A store whose queue has become large, and is empty."""
    store.bucket_bytes = BYTES
    for n in range(0, 200, 20):
        store.schedule(
            "q", [Entry(f"m{k}", 0, f'{{"x":"{"x" * 500}"}}', "2000") for k in range(n, n + 20)]
        )
    assert Backlog(store, "q").cancel([f"m{k}" for k in range(199)]) == [1] * 199
    assert store.large == {"q"}
    return store


SMALL = [
    *("as sent", "other argument lengths", "more", "in another zone", "urgent", "no result"),
    *("tried again", "in a group", "with limits", "with a callback", "with Unicode"),
]


@pytest.fixture(params=TASKS, ids=TASKS)
def text(request: pytest.FixtureRequest) -> str:
    text = task(ID, **TASKS[request.param])
    assert json.loads(text)["headers"]["id"] == ID
    if request.param in SMALL:
        assert len(pack(ID, "", text)) < len(text) - 300
    return text


def test_whoever_packs_a_record_it_is_the_same(
    store: Store, client: redis.Redis, text: str
) -> None:
    store.schedule("q", [Entry(ID, 0, text, "2000")])
    packed = kept(client, ID)
    assert store.records("q", [ID]) == [f"02000{text}".encode()]
    assert Backlog(store, "q").cancel([ID]) == [1]
    store.large.clear()
    store.schedule("q", [Entry(ID, 0, text, "2000")])
    assert kept(client, ID) == packed


def test_it_is_delivered_as_it_was_sent(store: Store, text: str) -> None:
    store.schedule("q", [Entry(ID, 0, text, "1500")])
    store.now = "1600"
    (record,) = deliver(store, "A-1000", 10).records
    assert record == b"0" + promoted(text, 1500).encode()


def test_with_a_delay_from_now(store: Store, text: str) -> None:
    store.schedule("q", [Entry(ID, 0, text, "+500")])
    store.now = "1600"
    (record,) = deliver(store, "A-1000", 10).records
    assert record == b"0" + promoted(text, 1500).encode()


@pytest.mark.parametrize("due", ["900", BEFORE_1970])
def test_what_is_due_already_is_ready_as_it_was_sent(
    store: Store, client: redis.Redis, text: str, due: str
) -> None:
    store.schedule("q", [Entry(ID, 0, text, due)])
    assert client.lrange("q", 0, -1) == [text.encode()]


def test_it_waits_at_a_gate(store: Store, text: str) -> None:
    ticket = put_ticket(text, Ticket("somebody").text("v1", ID))
    store.schedule("q", [Entry(ID, 0, ticket, "1500")])
    store.now = "1600"
    (record,) = deliver(store, "A-1000", 10, gate=Gate("v1")).records
    assert record == b"0" + promoted(ticket, 1500).encode()


def test_it_is_read_page_by_page(store: Store, text: str) -> None:
    store.schedule("q", [Entry(ID, 0, text, "3000")])
    found = Backlog(store, "q").page(due_after_ms=2500).waiting
    assert [(each.member, each.kept.message) for each in found] == [(ID, text.encode())]


def test_a_search_on_the_server_passes_over_no_text_of_its_headers(store: Store, text: str) -> None:
    """This is so even if packing has left the text out or cut it."""
    store.schedule("q", [Entry(ID, 0, text, "3000")])

    def found(needle: str) -> list[str]:
        page = Backlog(store, "q").page(due_after_ms=2500, needle=needle).waiting
        return [each.member for each in page]

    payload = json.loads(text)
    named = {**payload["headers"], **payload["properties"], "route": "celery"}
    words = [json.dumps(each)[1:-1] for each in named.values() if isinstance(each, str)]
    assert {word: found(word) for word in words if word} == {word: [ID] for word in words if word}
    assert found(words[0][:-1] + "?") == found("no_such_word") == []


def test_copies_with_one_id(store: Store, client: redis.Redis, text: str) -> None:
    other = text.replace("delivery_tag", "other_tag")
    assert store.schedule("q", [Entry(ID, 0, text, "2000")]).delayed == 1
    assert store.schedule("q", [Entry(ID, 0, text, "2000")]).already == 1
    assert store.schedule("q", [Entry(ID, 0, other, "2000")]).delayed == 1
    second = f"{ID}\x1f2"
    found = [each and open_kept(each).message for each in store.records("q", [ID, second])]
    assert found == [text.encode(), other.encode()]


def test_ids_that_are_numbers(store: Store) -> None:
    """A number behind a separator makes the name of another message with the same id."""
    texts = [task("7"), task("7", args=(1,))]
    for text in texts:
        assert store.schedule("q", [Entry("7", 0, text, "2000")]).delayed == 1
    found = store.records("q", ["7", "7\x1f2"])
    assert found == [f"02000{text}".encode() for text in texts]


def test_one_that_was_damaged_stops_no_other(store: Store, client: redis.Redis) -> None:
    text, other = task(ID), task("another")
    store.schedule("q", [Entry(ID, 0, text, "1500"), Entry("another", 0, other, "1500")])
    short = kept(client, ID)[:20]
    (bucket,) = (key for key in client.keys("{q}:messages:*[0-9]") if client.hexists(key, ID))
    client.hset(bucket, ID, short)
    store.now = "1600"
    assert set(deliver(store, "A-1000", 10).records) == {
        b"0" + short,
        b"0" + promoted(other, 1500).encode(),
    }


def test_another_due_time_leaves_it_packed(store: Store, client: redis.Redis) -> None:
    text, eta = task(ID), "2027-01-01T00:00:00+00:00"
    store.schedule("q", [Entry(ID, 0, text, "2000")])
    before = len(kept(client, ID))
    assert Backlog(store, "q").reschedule([Move(ID, "9000", eta)]) == [1]
    assert len(kept(client, ID)) < before
    (record,) = store.records("q", [ID])
    old = json.loads(text)["headers"]["eta"]
    assert record == f"09000{text.replace(old, eta)}".encode()


def test_a_small_queue_has_whole_messages(store: Store, client: redis.Redis) -> None:
    """This is so even if its producer does not know yet that it is small again."""
    text = task(ID)
    assert Backlog(store, "q").cancel(["m199"]) == [1]
    assert not client.keys(f"{KEY}*")
    assert store.large == {"q"}
    store.schedule("q", [Entry(ID, 0, text, "2000")])
    assert kept(client, ID) == f"02000{text}".encode()
    assert not store.large


def test_events_tell_of_it_as_of_any(store: Store, client: redis.Redis) -> None:
    store.event_limit = 1000
    texts = [
        task(ID),
        task(ID, ignore_result=True).replace('"stamps": {}', '"stamps": {}, "tenant": "t-1"'),
    ]
    texts += [
        task(ID).replace('"stamps": {}', '"stamps": {}, "x": {"tenant": "no"}'),
        task(ID, retries=1),
    ]
    told = []
    for large in ({"q"}, set()):
        for text in texts:
            store.large = set(large)
            store.schedule("q", [Entry(ID, 0, text, "2000")])
            (event,) = client.xrevrange("{q}:events", count=1)
            told.append(event[1])
            Backlog(store, "q").cancel([ID])
    assert told[:4] == told[4:]
    tenants = [json.loads(each[b"event"])[3] for each in told[:4]]
    assert tenants == ["", "t-1", "", ""]
    assert client.zscore("{q}:moved", ID), "a retry is noted"


@pytest.mark.parametrize("cut", ['"ignore_result": false', "false", "null", "{", '"id": "'])
def test_what_is_missing_stays_missing(store: Store, cut: str) -> None:
    text = task(ID, ignore_result=False)
    for broken in (text.replace(cut, ""), text[:1] + text[1:].replace(cut, "", 1)):
        for large in ({"q"}, set()):
            store.large = set(large)
            store.schedule("q", [Entry(ID, 0, broken, "2000")])
            assert store.records("q", [ID]) == [f"02000{broken}".encode()]
            Backlog(store, "q").cancel([ID])


def test_random_changes_are_kept(store: Store) -> None:
    """Parts may be missing, doubled or in another order."""
    dice = random.Random(7)
    for n in range(300):
        text = damaged(dice, f"id-{n}")
        store.schedule("q", [Entry(f"id-{n}", 0, text, "2000")])
        assert store.records("q", [f"id-{n}"]) == [f"02000{text}".encode()], text
