"""Large backlogs are compressed with a dictionary if an option enables it."""

from __future__ import annotations

import json
import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import redis

from kombu_delayed.connection.stock import stock_consumers
from kombu_delayed.errors import CompressionError, MessageError, OptionError, ServerFull
from kombu_delayed.inspection.backlog import Backlog, Move, queues
from kombu_delayed.inspection.doctor import examine_queues
from kombu_delayed.inspection.lookup import lookup_by_id, lookup_by_reading
from kombu_delayed.inspection.ready.index import ReadyIndex
from kombu_delayed.inspection.ready.lists import ReadyLists
from kombu_delayed.message import compressing, zstd
from kombu_delayed.message.envelope import open_kept
from kombu_delayed.message.ticket import Gate, Ticket, put_ticket
from kombu_delayed.message.zstd import train
from kombu_delayed.store.ledgers import Job, LedgerStore
from kombu_delayed.store.store import Entry, Limits, Store
from tests.kit.claims import deliver, full
from tests.kit.compressed import dictionary, entries, is_compressed, kept, make_large
from tests.kit.limited import BLIND, blind_user
from tests.kit.servers import Server
from tests.kit.state import promoted
from tests.kit.task_texts import ID, TASKS, damaged, task
from tests.kit.wait import wait_until

DICTIONARIES = "{q}:dictionaries"
BEFORE_1970 = "-62135596800000"
#: Packed instead, as scripts could not read these in front of compressed data.
NOT_COMPRESSED = {"a name to be escaped"}


@pytest.fixture
def store(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store whose queue is large, has a dictionary, and holds one compressed message."""
    monkeypatch.setattr(zstd, "train", lambda samples: dictionary())
    make_large(store)
    return store


@pytest.fixture(params=TASKS, ids=TASKS)
def text(request: pytest.FixtureRequest, store: Store) -> str:
    text = task(ID, **TASKS[request.param])
    version = store.dictionaries.packer("q")[1].encode()
    made = compressing.compress(ID, "", text, version)
    record = made if isinstance(made, bytes) else made.encode()
    assert record.startswith(b"\1z") == (request.param not in NOT_COMPRESSED), record
    return text


# Every way in and out.


def test_it_is_read_as_it_was_sent(store: Store, text: str) -> None:
    store.schedule("q", [Entry(ID, 0, text, "2000")])
    assert store.records("q", [ID]) == [f"02000{text}".encode()]
    (found,) = Backlog(store, "q").get(ID)
    assert found.kept.message == text.encode()
    page = Backlog(store, "q").page().waiting
    assert text.encode() in [each.kept.message for each in page]
    assert [each.message for each in lookup_by_id(store, "q", ID)] == [text.encode()]
    assert [each.kept.message for each in Backlog(store, "q").take([ID])] == [text.encode()]


def test_it_is_delivered_as_it_was_sent(store: Store, text: str) -> None:
    store.schedule("q", [Entry(ID, 0, text, "1500")])
    store.now = "1600"
    (record,) = deliver(store, "A-1000", 10).records
    assert store.readable("q", record) == b"0" + promoted(text, 1500).encode()


def test_with_a_delay_from_now(store: Store, text: str) -> None:
    store.schedule("q", [Entry(ID, 0, text, "+500")])
    assert store.records("q", [ID]) == [f"01500{text}".encode()]


@pytest.mark.parametrize("due", ["900", BEFORE_1970])
def test_what_is_due_already_is_ready(
    store: Store, client: redis.Redis, text: str, due: str
) -> None:
    store.schedule("q", [Entry(ID, 0, text, due)])
    (found,) = client.lrange("q", 0, -1)
    assert store.readable("q", found) == text.encode()


def test_it_waits_at_a_gate(store: Store, text: str) -> None:
    ticket = put_ticket(text, Ticket("somebody").text("v1", ID))
    store.schedule("q", [Entry(ID, 0, ticket, "1500")])
    store.now = "1600"
    (record,) = deliver(store, "A-1000", 10, gate=Gate("v1")).records
    assert store.readable("q", record) == b"0" + promoted(ticket, 1500).encode()


def test_copies_with_one_id(store: Store, client: redis.Redis, text: str) -> None:
    """They are recognized in any form, even under another name of their sender."""
    again = text.replace("gen7@web-1", "gen8@web-2").replace(
        '"delivery_tag": "', '"delivery_tag": "1'
    )
    other = text.replace("send_email", "send_mail").replace(
        'delivery_mode": 2', 'delivery_mode": 1'
    )
    assert len({text, again, other}) == 3
    for first, second in (("zstd", "zstd"), ("zstd", ""), ("", "zstd")):
        store.compression = first
        assert store.schedule("q", [Entry(ID, 0, text, "2000")]).delayed == 1
        store.compression = second
        assert store.schedule("q", [Entry(ID, 0, again, "2000")]).already == 1
        assert store.schedule("q", [Entry(ID, 0, other, "2000")]).delayed == 1
        found = [each.kept.message for each in Backlog(store, "q").get(ID)]
        assert found == [text.encode(), other.encode()]
        assert Backlog(store, "q").cancel([ID]) == [2]


def test_ids_that_are_numbers(store: Store) -> None:
    texts = [task("7"), task("7", args=(1,))]
    for text in texts:
        assert store.schedule("q", [Entry("7", 0, text, "2000")]).delayed == 1
    found = store.records("q", ["7", "7\x1f2"])
    assert found == [f"02000{text}".encode() for text in texts]


def test_messages_are_small(store: Store, client: redis.Redis) -> None:
    some = entries(100, seed=5)
    store.schedule("q", some)
    sizes = [len(kept(client, each.id)) for each in some]
    assert sum(sizes) / 100 < sum(len(each.message) for each in some) / 100 / 5
    assert all(is_compressed(kept(client, each.id)) for each in some)


def test_what_a_page_has_found_is_read_when_it_is_asked_for(
    store: Store, client: redis.Redis, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue may have been emptied since then, and its dictionaries may be gone."""
    store.schedule("q", [Entry(ID, 0, text, "3000")])
    (waiting,) = Backlog(store, "q").page(due_after_ms=2500).waiting
    assert waiting.seen is None or waiting.seen[:2] == (0, 3000)
    assert waiting.seen is None or f'"task": "{waiting.seen.task.decode()}"' in text
    client.flushall()
    monkeypatch.setattr(compressing, "_codecs", {})
    assert waiting.kept == (0, 3000, text.encode())
    monkeypatch.undo()


def test_most_are_not_read_before_they_are_asked_for(store: Store) -> None:
    store.schedule("q", [Entry(ID, 0, task(ID), "3000")])
    (waiting,) = Backlog(store, "q").page(due_after_ms=2500).waiting
    assert waiting.seen is not None
    assert is_compressed(waiting.compressed)


# Changes by scripts, which cannot decompress.


def test_another_due_time(store: Store, client: redis.Redis) -> None:
    text, eta = task(ID), "2027-01-01T00:00:00+00:00"
    store.schedule("q", [Entry(ID, 0, text, "2000")])
    before = len(kept(client, ID))
    assert Backlog(store, "q").reschedule([Move(ID, "9000", eta)]) == [1]
    assert len(kept(client, ID)) <= before
    old = json.loads(text)["headers"]["eta"]
    moved = text.replace(old, eta)
    assert store.records("q", [ID]) == [f"09000{moved}".encode()]
    store.compression = ""
    assert store.schedule("q", [Entry(ID, 0, moved, "9000")]).already == 1
    assert store.schedule("q", [Entry(ID, 0, text, "2000")]).delayed == 1


def test_without_an_eta_it_gets_none(store: Store) -> None:
    text = task(ID, eta=None)
    store.schedule("q", [Entry(ID, 0, text, "+1000")])
    assert Backlog(store, "q").reschedule([Move(ID, "9000", "2027-01-01T00:00:00+00:00")]) == [1]
    assert store.records("q", [ID]) == [f"09000{text}".encode()]


def test_it_goes_back_and_becomes_a_dead_letter_and_another_try(
    store: Store, client: redis.Redis
) -> None:
    store.limits = Limits(max_deliveries=2)
    text = task(ID, retries=3, root_id="another", parent_id="one more")
    store.schedule("q", [Entry(ID, 0, text, "1500")])
    store.now = "1600"
    for _ in range(2):  # the second time is one too many
        (record,) = deliver(store, "A-1000", 10).records
        assert is_compressed(record)
        store.release("q", "A-1000", [1], counted=True)
        (found,) = [*client.lrange("q", 0, -1), *client.hvals("{q}:dead-messages")]
        sent = promoted(text, 1500)[:-1] + ',"deliveries":1}'
        assert store.readable("q", found).lstrip(b"0") == sent.encode()
    assert is_compressed(found)
    (letter,) = store.dead.letters("q", store.dead.ids("q"))
    assert (letter.id, letter.message) == (ID, sent.encode())
    assert next(store.dead.scan("q", 10)) == [(ID.encode(), b"0" + sent.encode())]
    assert store.dead.replay("q", [ID], 9000) == 1
    (found,) = store.records("q", [ID])
    again = json.loads(open_kept(found).message)
    again.pop("wait", None)
    expected = json.loads(text)
    expected["headers"]["retries"] = 0
    assert again == expected


def test_a_change_and_its_race(store: Store) -> None:
    text, other = task(ID), task(ID, args=(7,))
    store.schedule("q", [Entry(ID, 0, text, "2000")])
    backlog = Backlog(store, "q")
    (waiting,) = backlog.get(ID)
    assert backlog.revise(waiting, 3, other.encode(), 3000)
    assert not backlog.revise(waiting, 3, text.encode(), 3000), "it is not what was read any more"
    assert store.records("q", [ID]) == [f"33000{other}".encode()]


def test_ready_messages_are_found_changed_and_dropped(store: Store, client: redis.Redis) -> None:
    first, second, third = (task(f"id-{n}") for n in range(3))
    index = ReadyIndex()
    for n, text in enumerate((first, second)):
        store.schedule("q", [Entry(f"id-{n}", 0, text, "900")])
    assert index.find(store, ["q"], "id-1")[0][0].ready.message == second.encode()
    store.schedule("q", [Entry("id-2", 0, third, "900")])
    assert index.find(store, ["q"], "id-2")[0][0].ready.message == third.encode()
    assert [each.message for each in lookup_by_reading(store, "q", "id-0")] == [first.encode()]
    assert all(map(is_compressed, client.lrange("q", 0, -1)))
    lists = ReadyLists(store, "q")
    page = [each for page in lists.pages(["nobody has this text"]) for each in page]
    assert [each.message for each in page] == [third.encode(), second.encode(), first.encode()]
    assert lists.amend(page[0], "id-2", third.replace("send_email", "write").encode())
    assert lists.withdraw(page) == [False, True, True]


def test_pages_leave_out_no_message_whose_text_is_not_readable(store: Store) -> None:
    store.schedule("q", [Entry(ID, 0, task(ID), "3000")])
    page = Backlog(store, "q").page(due_after_ms=2900, needle="gen7@web-1").waiting
    assert [each.id for each in page] == [ID]


def test_events_tell_of_it_as_of_any(store: Store, client: redis.Redis) -> None:
    store.event_limit = 1000
    texts = [task(ID), task(ID, retries=1)]
    texts += [
        texts[0].replace('"stamps": {}', f'"stamps": {{}}, {more}')
        for more in (
            '"tenant": "t-1"',
            '"tenant": 7',
            '"x": {"tenant": "no"}',
            '"x": {"tenant": "no"}, "tenant": "t-2"',
        )
    ]
    told: list[Any] = []
    for compression in ("zstd", ""):
        store.compression = compression
        for text in texts:
            store.schedule("q", [Entry(ID, 0, text, "1500")])
            store.now = "1600"
            deliver(store, "A-1000", 1)
            store.release("q", "A-1000", [1], counted=True)
            deliver(store, "A-1000", 1)
            store.ack("q", "A-1000", [1], lambda: None)
            store.run.settle()
            store.now = "1000"
        told.append([fields for _, fields in client.xrange("{q}:events")])
        client.delete("{q}:events")
    assert told[0] == told[1]
    tenants = [json.loads(each[b"event"])[3] for each in told[0][::5]]
    assert tenants == ["", "", "t-1", "7", "", "t-2"]


# Mixed queues, and clients that may not take part.


def test_switched_on_and_off(store: Store, client: redis.Redis) -> None:
    sent: dict[str, bytes] = {}
    for n, compression in enumerate(("zstd", "", "zstd", "")):
        store.compression = compression
        for each in entries(20, due_ms=1100, seed=10 + n):
            store.schedule("q", [each])
            sent[each.id] = promoted(each.message, int(each.due)).encode()
    forms = {is_compressed(kept(client, id)) for id in sent}
    assert forms == {True, False}
    store.now = "1900"
    got = [store.readable("q", each)[1:] for each in deliver(store, "A-1000", 200).records]
    assert sorted(got) == sorted(sent.values())


def test_a_small_queue_is_not_compressed(store: Store, client: redis.Redis) -> None:
    """This is so even if its producer does not know yet that it is small again."""
    store.purge("q")
    assert not client.keys("*"), "its dictionaries are gone as well"
    assert store.large == {"q"}
    text = task(ID)
    store.schedule("q", [Entry(ID, 0, text, "2000")])
    assert kept(client, ID) == f"02000{text}".encode()
    assert not store.large


def test_beside_a_worker_of_0_1_0_nothing_is_compressed(store: Store, client: redis.Redis) -> None:
    store.purge("q")
    client.zadd("{q}:consumers", {"host:1:ab": 10**13})
    some = entries(200, seed=3)
    for each in some:
        store.schedule("q", [each])
    assert not store.large
    assert kept(client, some[-1].id) == f"0{some[-1].due}{some[-1].message}".encode()


def test_a_dictionary_that_was_lost_is_not_used(store: Store, client: redis.Redis) -> None:
    """For example after a failover that has lost it: the producer still has it at hand."""
    client.delete(DICTIONARIES)
    text = task(ID)
    assert store.schedule("q", [Entry(ID, 0, text, "2000")]).delayed == 1
    assert not is_compressed(kept(client, ID))
    assert store.records("q", [ID]) == [f"02000{text}".encode()]


def test_a_queue_with_an_expiry_is_not_compressed(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [Entry(ID, 0, task(ID), "2000")], expires_ms=60_000)
    assert not is_compressed(kept(client, ID))


def test_a_full_server_takes_no_dictionary(store: Store, client: redis.Redis) -> None:
    store.purge("q")
    some = entries(150, seed=4)
    for each in some:
        store.schedule("q", [each])
    store.known_dictionaries.current.clear()
    with full(client):
        assert store.dictionaries.packer("q")[1] == ""
    assert not client.exists(DICTIONARIES)


@pytest.mark.parametrize("expires", [False, True])
def test_a_full_server_takes_no_compressed_message(
    store: Store, client: redis.Redis, expires: bool
) -> None:
    if expires:  # the queue was empty for a while
        client.expire(DICTIONARIES, 600)
    more = [Entry(ID, 0, task(ID), "2000")]
    job = LedgerStore(store, Job("job", "run", 60))
    job.shards.count("q")
    before = client.keys(), client.ttl(DICTIONARIES) > 0, store.size("q")
    with full(client):
        for each in (store, job):
            with pytest.raises(ServerFull):
                each.schedule("q", more)
    assert (client.keys(), client.ttl(DICTIONARIES) > 0, store.size("q")) == before
    store.schedule("q", more)
    assert is_compressed(kept(client, ID))
    assert client.ttl(DICTIONARIES) == -1


# Dictionaries.


def test_versions_stay_while_the_queue_has_messages(store: Store, client: redis.Redis) -> None:
    text = task(ID)
    store.schedule("q", [Entry(ID, 0, text, "2000")])
    (first,) = [name for name in client.hkeys(DICTIONARIES) if len(name) == 8]
    other = zstd.train(
        [each.message.replace("customer", "client").encode() for each in entries(150)]
    )
    version = compressing.learn(other)
    given = {"before": first, "version": version, "text": other, "most": 16}
    assert store.ask("keep_dictionary", "q", **given) == version
    assert store.ask("keep_dictionary", "q", **given) == version, "twice is safe"
    store.known_dictionaries.current.clear()
    store.schedule("q", [Entry("id-2", 0, task("id-2"), "2000")])
    assert version in kept(client, "id-2")
    assert store.records("q", [ID]) == [f"02000{text}".encode()]
    assert not store.dictionaries.forget_unused("q", 0)
    assert client.exists(DICTIONARIES)


def test_there_is_a_limit_of_versions(store: Store, client: redis.Redis) -> None:
    (first,) = [name for name in client.hkeys(DICTIONARIES) if len(name) == 8]
    given = {"before": first, "version": "0" * 8, "text": "x", "most": 1}
    assert store.ask("keep_dictionary", "q", **given) == first


@pytest.mark.parametrize("state", ["delayed", "ready", "unacked", "dead"])
def test_they_go_when_no_message_is_left_in_any_state(
    store: Store, client: redis.Redis, state: str
) -> None:
    Backlog(store, "q").cancel([each.id for each in entries(1, seed=2)])
    store.schedule("q", [Entry(ID, 0, task(ID), "1500" if state != "delayed" else "9000")])
    store.now = "1600"
    if state != "delayed":
        deliver(store, "A-1000", 1)
    if state == "ready":
        store.release("q", "A-1000", [1])
    if state == "dead":
        store.bury("q", "A-1000", [(1, ID, "why", b"")])
    assert not store.dictionaries.forget_unused("q", 0)
    end = {
        "delayed": lambda: Backlog(store, "q").cancel([ID]),
        "ready": lambda: store.purge("q"),
        "unacked": lambda: (store.ack("q", "A-1000", [1], lambda: None), store.run.settle()),
        "dead": lambda: store.dead.purge("q", [ID]),
    }
    end[state]()
    assert store.dictionaries.forget_unused("q", 0)
    assert not client.exists(DICTIONARIES)


def test_who_reads_what_has_just_left_has_time_for_it(store: Store, client: redis.Redis) -> None:
    assert not store.dictionaries.forget_unused("q")
    assert client.ttl(DICTIONARIES) == -1
    Backlog(store, "q").cancel([each.id for each in entries(1, seed=2)])
    assert store.dictionaries.are_unused("q")
    assert client.ttl(DICTIONARIES) == -1, "nothing is changed"
    assert store.dictionaries.forget_unused("q", 900_000)
    assert store.dictionaries.forget_unused("q", 990_000)
    assert 800_000 < client.pttl(DICTIONARIES) <= 900_000, "its time does not begin anew"
    assert not store.dictionaries.are_unused("q")


def test_a_message_that_comes_meanwhile_keeps_them(store: Store, client: redis.Redis) -> None:
    Backlog(store, "q").cancel([each.id for each in entries(1, seed=2)])
    assert store.dictionaries.forget_unused("q")
    client.set("{q}:messages:buckets", "1 1")
    store.schedule("q", [Entry(ID, 0, task(ID), "9000")])
    assert is_compressed(kept(client, ID))
    assert client.ttl(DICTIONARIES) == -1


@pytest.fixture
def expired(store: Store, client: redis.Redis) -> None:
    """The queue has lost its dictionary, which this process does not know yet."""
    Backlog(store, "q").cancel([each.id for each in entries(1, seed=2)])
    store.dictionaries.forget_unused("q")
    client.pexpire(DICTIONARIES, 0)
    client.set("{q}:messages:buckets", "1 1")


@pytest.mark.usefixtures("expired")
def test_a_producer_whose_dictionary_has_expired_sends_again(store: Store) -> None:
    text = task(ID)
    assert store.schedule("q", [Entry(ID, 0, text, "9000")]).delayed == 1
    assert store.records("q", [ID]) == [f"09000{text}".encode()]


@pytest.mark.usefixtures("expired")
def test_it_sends_again_what_was_due_before_1970(store: Store, client: redis.Redis) -> None:
    text = task(ID)
    assert store.schedule("q", [Entry(ID, 0, text, BEFORE_1970)]).ready == 1
    assert client.lrange("q", 0, -1) == [text.encode()]


def test_a_doctor_drops_those_of_an_empty_queue(store: Store, client: redis.Redis) -> None:
    assert not {each.kind for each in examine_queues(store, ["q"])} & {"dictionary"}
    Backlog(store, "q").cancel([each.id for each in entries(1, seed=2)])
    assert "q" in queues(store), "it has nothing else"
    (found,) = examine_queues(store, ["q"])
    assert (found.kind, found.count, found.is_wrong) == ("dictionary", 1, False)
    (found,) = examine_queues(store, ["q"], fix=True)
    assert found.fixed == 1
    assert not client.exists(DICTIONARIES)
    assert not examine_queues(store, ["q"])


def purged(store: Store) -> str:
    """Replace a compressed backlog by one without a dictionary; returns the version that it had."""
    version = store.dictionaries.packer("q")[1]
    store.purge("q")
    for each in entries(150, seed=4):
        store.schedule("q", [each])
    return version


def warning_of(store: Store, client: redis.Redis, caplog: pytest.LogCaptureFixture) -> str:
    """Check that nothing is compressed; returns the warning, of which there is one."""
    for _ in range(2):
        store.known_dictionaries.current.clear()
        assert store.dictionaries.packer("q")[1] == ""
    assert not client.exists(DICTIONARIES)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    return record.getMessage()


def look_again(store: Store) -> str:
    """The version of the dictionary when other clients are looked at again."""
    store.known_dictionaries.current.clear()
    store.known_dictionaries.shared_until.clear()
    return store.dictionaries.packer("q")[1]


def test_beside_stock_workers_nothing_is_compressed(
    store: Store, client: redis.Redis, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Stock workers would lose it."""
    version = purged(store)
    with server.client() as stock, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(stock.brpop, ["other"], 30)
        wait_until(lambda: stock_consumers(client), "it waits")
        assert "'q' is not compressed" in warning_of(store, client, caplog)
        client.lpush("other", "end")
        waiting.result()
    store.known_dictionaries.current.clear()
    assert store.dictionaries.packer("q")[1] == "", "that is not looked at again for a while"
    assert look_again(store) == version


def test_a_user_who_may_not_list_clients_compresses_nothing(
    store: Store, client: redis.Redis, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Stock workers may be there."""
    version = purged(store)
    with blind_user(client), server.client(username=BLIND, password=BLIND) as blind:
        limited = Store(blind, now="1000")
        assert warning_of(limited, client, caplog).endswith("Give the user the right +client|list")
        client.acl_setuser(BLIND, enabled=True, commands=["+client|list"])
        assert look_again(limited) == version


def test_a_better_one_is_taken_after_a_while(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zstd, "train", train)
    (first,) = [name for name in client.hkeys(DICTIONARIES) if len(name) == 8]
    dice = random.Random(9)
    names = [uuid.UUID(int=dice.getrandbits(128)).hex for _ in range(30)]
    for n in range(200):
        values = {name: dice.randrange(9) for name in names}
        store.schedule("q", [Entry(f"n{n}", 0, task(f"n{n}", args=(), kwargs=values), "5000")])
    store.known_dictionaries.current.clear()
    assert store.dictionaries.packer("q")[1] == first.decode(), "it was looked at lately"
    store.known_dictionaries.current.clear()
    store.now = str(1000 + 86_400_000)
    assert store.dictionaries.packer("q")[1] != first.decode()
    assert client.hget(DICTIONARIES, "count") == b"2"


# Messages that cannot be read.


def test_without_the_extra_a_reader_says_what_to_install(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.schedule("q", [Entry(ID, 0, task(ID), "2000")])
    monkeypatch.setattr(compressing, "_codecs", {})

    def missing() -> Any:
        raise CompressionError

    monkeypatch.setattr(zstd, "_library", missing)
    with pytest.raises(CompressionError, match=r"pip install 'kombu-delayed\[zstd\]'"):
        Backlog(store, "q").get(ID)
    assert Backlog(store, "q").reschedule([Move(ID, "3000")]) == [1]
    assert Backlog(store, "q").cancel([ID]) == [1], "what needs no text works"


def test_damaged_messages_are_shown_as_they_are(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [Entry(ID, 0, task(ID), "2000")])
    key = next(
        key
        for key in client.keys("{q}:messages:*")
        if client.type(key) == b"hash" and client.hexists(key, ID)
    )
    record = client.hget(key, ID)
    dice = random.Random(3)
    for _ in range(200):
        at = dice.randrange(20, len(record))
        client.hset(key, ID, record[:at] + bytes([dice.randrange(256)]) + record[at + 1 :])
        with suppress(MessageError):
            Backlog(store, "q").get(ID)


def test_random_changes_are_kept(store: Store) -> None:
    """Parts may be missing, doubled or in another order."""
    dice = random.Random(7)
    for n in range(300):
        text = damaged(dice, f"id-{n}")
        store.schedule("q", [Entry(f"id-{n}", 0, text, "2000")])
        assert store.records("q", [f"id-{n}"]) == [f"02000{text}".encode()], text


def test_another_kind_is_refused() -> None:
    from kombu_delayed.connection.options import Options

    assert Options.parse({"delayed_compression": "zstd"}).compression == "zstd"
    with pytest.raises(OptionError, match="'zstd', not 'gzip'"):
        Options.parse({"delayed_compression": "gzip"})
