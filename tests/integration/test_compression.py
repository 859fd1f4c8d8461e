"""A compressed queue works like any other for senders, consumers and operators."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from click.testing import CliRunner
from kombu import Queue

from celery_ext import Delayed, Query, QueryError
from celery_ext.cli.checkup import Check, check_up
from celery_ext.tasks.body import read_body
from kombu_delayed import migrate
from kombu_delayed.errors import CompressionError
from kombu_delayed.inspection.doctor import examine_queues
from kombu_delayed.message import compressing, zstd
from kombu_delayed.migrate import Move
from kombu_delayed.migrate import __main__ as command
from kombu_delayed.store.store import Store
from tests.kit.compressed import dictionary, entries, is_compressed, kept, make_large
from tests.kit.connections import forget_connections
from tests.kit.http import api_client, bury
from tests.kit.inbox import Connect, Inbox
from tests.kit.ledger import Ledger
from tests.kit.limited import BLIND, blind_user
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

FAR_MS = 4_000_000_000_000
CELERY = Queue("celery")
#: The one that is there from the beginning.
FIRST = entries(1, FAR_MS, seed=2)[0]
SENTENCE = r"need Zstandard in this process: pip install 'kombu-delayed\[zstd\]'"


@pytest.fixture(autouse=True)
def large(server: Server, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The queue has a dictionary, and one delayed task."""
    monkeypatch.setattr(zstd, "train", lambda samples: dictionary())
    store = Store(client)
    make_large(store, "celery", FAR_MS)
    return store


def settings(server: Server, **more: Any) -> Settings:
    options = {"delayed_compression": "zstd"}
    return Settings(f"delayed+{server.url}", transport_options=options, **more)


@pytest.fixture
def app(server: Server) -> Iterator[Celery]:
    forget_connections()  # producers of an earlier app may know that the queue is large
    with make_app(settings(server)) as app:
        yield app


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that lacks the library."""

    def missing() -> Any:
        raise CompressionError

    monkeypatch.setattr(zstd, "_library", missing)
    monkeypatch.setattr(compressing, "_codecs", {})
    zstd.is_installed.cache_clear()
    yield
    zstd.is_installed.cache_clear()


def send(app: Celery, count: int, countdown: float = 3600, **options: Any) -> list[str]:
    """Its first message tells a producer that the queue is large."""
    return [
        app.send_task("record", (n, "order" * 20), countdown=countdown, **options).id
        for n in range(count)
    ]


def test_who_sends_compresses_from_the_second_message_on(
    app: Celery, delayed: Delayed, client: redis.Redis
) -> None:
    first, second = send(app, 2)
    assert not is_compressed(kept(client, first, "celery"))
    assert is_compressed(kept(client, second, "celery"))
    infos = {info.id: info for info in delayed.find()}
    assert infos.keys() == {first, second, FIRST.id}
    assert (read_body(app, infos[second]) or ())[0] == [1, "order" * 20]


def test_control(app: Celery, delayed: Delayed, client: redis.Redis) -> None:
    _, *ids = send(app, 6, headers={"tenant": "t", "color": "red"})
    found = [info.id for info in delayed.find(header={"color": "red"})]
    assert {*ids} < {*found}, "what is compressed is no less found"
    one, two, three, four, _ = ids
    assert (info := delayed.get(one)) is not None
    assert (info.task, info.tenant) == ("record", "t")
    assert delayed.change(one, args=[7])
    assert delayed.reschedule(two, eta="2031-01-01T00:00:00Z")
    assert delayed.cancel(three)
    assert delayed.run_now(four)
    assert (read_body(app, delayed.get(one)) or ())[0] == [7]
    assert delayed.get(two).eta.isoformat() == "2031-01-01T00:00:00+00:00"
    assert delayed.get(three) is None
    assert delayed.get(four).state == "ready"
    assert delayed.cancel_many(Query(task="record")).changed == 4


def test_what_was_found_is_as_what_was_looked_up(app: Celery, delayed: Delayed) -> None:
    _, id = send(app, 2, headers={"tenant": "t"})
    found = {info.id: info for info in delayed.find(task="rec*")}[id]
    assert "message" not in vars(found), "it is read when it is asked for"
    assert (found.task, found.due_ms, found.state) == ("record", delayed.get(id).due_ms, "delayed")
    assert pickle.loads(pickle.dumps(found)) == found == replace(delayed.get(id), member=id)
    assert found.as_dict()["tenant"] == "t"
    with pytest.raises(AttributeError, match="no attribute 'color'"):
        found.color  # noqa: B018


def test_many_at_once(app: Celery, delayed: Delayed, client: redis.Redis) -> None:
    rows = [app.signature("record", (n, "order" * 20), countdown=3600) for n in range(100)]
    assert delayed.schedule_many(rows, batch=10).delayed == 100
    ids = [info.id for info in delayed.find()]
    assert len(ids) == 101
    forms = Counter(is_compressed(kept(client, id, "celery")) for id in ids)
    assert forms[True] >= 80, "all but those that were sent before the first answer"


def test_many_at_once_where_the_dictionary_is_lost_meanwhile(
    app: Celery, delayed: Delayed, client: redis.Redis
) -> None:
    send(app, 2)
    client.delete("{celery}:dictionaries")
    delayed.cancel(FIRST.id)
    rows = [app.signature("record", (n,), countdown=3600) for n in range(100)]
    assert delayed.schedule_many(rows, batch=10).delayed == 100
    assert len([*delayed.find()]) == 102


def test_a_backup_has_it_as_it_was(
    app: Celery, delayed: Delayed, client: redis.Redis, tmp_path: Path
) -> None:
    send(app, 3)
    before = {info.id: info.message for info in delayed.find()}
    delayed.backup(tmp_path / "all")
    assert delayed.restore(tmp_path / "all").already == 4
    client.flushall()
    assert delayed.restore(tmp_path / "all").messages == 4
    assert {info.id: info.message for info in delayed.find()} == before


def test_a_backup_that_is_restored_twice_doubles_nothing(
    app: Celery, delayed: Delayed, client: redis.Redis, tmp_path: Path
) -> None:
    """Neither dead letters nor messages that were retried, delivered or replayed before."""
    _, dead, replayed, delivered, moved = send(app, 5, retries=3)
    for id in (dead, replayed):
        assert delayed.run_now(id)
    bury(delayed)
    assert delayed.dead.replay([replayed], at="2040-01-01T00:00:00+00:00") == 1
    store, consumer = delayed.store, "w:1:x"
    assert delayed.run_now(delivered)
    for tag in (1, 2):  # it is lost once, and then a policy lets it wait
        store.deliver("celery", consumer, 1, tag, lease_ms=60_000)
        if tag == 1:
            store.release("celery", consumer, [tag], counted=True)
    store.park("celery", consumer, [(2, delivered, FAR_MS)])
    assert delayed.reschedule(moved, eta="2041-01-01T00:00:00Z")
    before = sorted((info.id, info.message) for info in delayed.find())
    letters = [letter.letter for letter in delayed.dead.list()]
    assert [each.id for each in letters] == [dead]
    assert b'"deliveries"' in dict(before)[delivered]
    for _ in range(2):
        delayed.backup(tmp_path / "all")
        report = delayed.restore(tmp_path / "all")
        assert (report.messages, report.dead) == (0, 0)
    assert sorted((info.id, info.message) for info in delayed.find()) == before
    assert [letter.letter for letter in delayed.dead.list()] == letters
    client.flushall()
    report = delayed.restore(tmp_path / "all")
    assert (report.messages, report.dead) == (len(before), 1)


def test_a_number_as_an_id_is_not_taken_for_the_retries(app: Celery, delayed: Delayed) -> None:
    send(app, 1)
    app.send_task("record", (1, "order" * 20), countdown=3600, task_id="3", retries=3)
    assert delayed.run_now("3")
    bury(delayed)
    assert delayed.dead.replay(["3"]) == 1
    info = delayed.get("3")
    assert info is not None
    assert (info.headers["id"], info.headers["retries"]) == ("3", 0)


def test_more_queues_than_dictionaries_at_hand(
    app: Celery, delayed: Delayed, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressing, "MOST_CODECS", 1)
    monkeypatch.setattr(compressing, "_codecs", {})
    made = iter([dictionary(2)])
    monkeypatch.setattr(zstd, "train", lambda samples: next(made))
    make_large(Store(client), "other", FAR_MS)
    for number in range(4):
        for queue in ("celery", "other"):
            rows = [app.signature("record", (n,), countdown=60, queue=queue) for n in range(3)]
            assert delayed.schedule_many(rows).delayed == 3
            id = app.send_task("record", (number,), countdown=60, queue=queue).id
            assert is_compressed(kept(client, id, queue)) or not number
    assert len([*delayed.find(task="record")]) == 32


def test_what_cannot_be_read_again_is_not_compressed(
    app: Celery, delayed: Delayed, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zstd, "LONGEST_BYTES", 2_000)
    send(app, 1)
    id = app.send_task("record", ("x" * 3_000,), countdown=3600).id
    assert not is_compressed(kept(client, id, "celery"))


def test_a_dictionary_that_is_gone_is_noticed(
    app: Celery, delayed: Delayed, client: redis.Redis, tmp_path: Path
) -> None:
    _, id = send(app, 2)
    assert not examine_queues(delayed.store, ["celery"])
    version = client.hget("{celery}:dictionaries", "current").decode()
    client.delete("{celery}:dictionaries")
    compressing._codecs.clear()
    (finding,) = examine_queues(delayed.store, ["celery"], fix=True)
    assert (finding.kind, finding.count, finding.fixed) == ("undecodable", 1, 0)
    assert version in finding.examples[0]
    report = delayed.backup(tmp_path / "all")
    assert (report.messages, report.undecodable) == (3, 2)
    restored = delayed.restore(tmp_path / "all")
    assert (restored.already, restored.undecodable) == (3, 2)
    send(app, 1, queue="other")
    for change in (lambda: delayed.change(id, priority=3), lambda: delayed.redirect(id, "other")):
        with pytest.raises(QueryError, match="a dictionary that its queue has lost"):
            change()


def test_over_http(app: Celery, client: redis.Redis) -> None:
    _, id = send(app, 2)
    with api_client(app) as api:
        assert api.get(f"/v1/tasks/{id}").json()["args"].startswith("(1, 'orderorder")
        assert api.delete(f"/v1/tasks/{id}").status_code == 204


def test_workers_run_it(
    server: Server, app: Celery, delayed: Delayed, tmp_path: Path, client: redis.Redis
) -> None:
    ids = send(app, 4)
    assert is_compressed(kept(client, ids[-1], "celery"))
    ledger = Ledger(tmp_path / "ledger")
    with Worker(settings(server, ledger=str(ledger.path)), tmp_path) as worker:
        assert {*map(delayed.run_now, ids)} == {True}
        ledger.wait_for_all(ids)
        assert "Traceback" not in worker.log


def test_back_to_the_stock_transport_it_is_as_it_was(
    server: Server, large: Store, client: redis.Redis
) -> None:
    some = entries(4, FAR_MS, seed=7)
    large.schedule("celery", some[:2])
    large.schedule("celery", [each._replace(due="900") for each in some[2:]])
    large.now = "1600"
    got = large.deliver("celery", "A-1000", 1, 1, lease_ms=60_000)
    assert got is not None
    assert is_compressed(got.records[0])
    large.bury("celery", "A-1000", [(1, some[2].id, "why", b"")])
    large.leases.leave("celery", "A-1000")
    large.now = ""
    with migrate.open_channel(server.url) as channel:
        report = migrate.to_stock(channel, force=True, dead=True)
    assert not report.left
    texts = [json.loads(each) for each in client.lrange("celery", 0, -1)]
    for each in texts:
        each.pop("due_ms", None)
    sent = [json.loads(each.message) for each in (FIRST, *some)]
    by_id = lambda each: each["headers"]["id"]  # noqa: E731
    assert sorted(texts, key=by_id) == sorted(sent, key=by_id)


def test_ready_ones_go_back_if_nothing_is_delayed(
    server: Server, large: Store, client: redis.Redis
) -> None:
    """A stock worker would lose them."""
    assert large.ask("reschedule", "celery", whole=1, entries=[FIRST.id, "0", ""]) == b"1"
    (before,) = client.lrange("celery", 0, -1)
    assert is_compressed(before)
    with migrate.open_channel(server.url) as channel:
        planned = migrate.plan(channel, "to-stock")
    assert client.lrange("celery", 0, -1) == [before]
    result = CliRunner().invoke(command.main, ["to-stock", server.url, "--yes"])
    assert "Moved:" in result.output
    (text,) = client.lrange("celery", 0, -1)
    assert json.loads(text)["headers"]["id"] == FIRST.id
    assert not is_compressed(text)
    with migrate.open_channel(server.url) as channel:
        assert not migrate.to_stock(channel).moved
    assert planned.moves == {Move("celery", "compressed", "ready"): 1}


def test_who_lacks_the_extra_does_not_consume(
    connect: Connect, large: Store, without_extra: None
) -> None:
    with pytest.raises(CompressionError, match=SENTENCE):
        Inbox(connect().channel(), CELERY)


@pytest.mark.parametrize("no_ack", [False, True])
def test_who_lacks_the_extra_loses_nothing(
    connect: Connect, large: Store, client: redis.Redis, without_extra: None, no_ack: bool
) -> None:
    """The queue is compressed for the first time while it is consumed."""
    saved = client.dump("{celery}:dictionaries")
    client.delete("{celery}:dictionaries")
    connection = connect()
    inbox = Inbox(connection.channel(), CELERY, no_ack=no_ack)
    client.restore("{celery}:dictionaries", 0, saved)
    assert large.ask("reschedule", "celery", whole=1, entries=[FIRST.id, "0", ""]) == b"1"
    with pytest.raises(CompressionError, match=SENTENCE):
        inbox.receive(1)
    connection.close()
    (found,) = client.lrange("celery", 0, -1)
    assert is_compressed(found)
    assert b'"deliveries":1' not in found, "it was no attempt"


def test_who_lacks_the_extra_cannot_ask_for_it(connect: Connect, without_extra: None) -> None:
    with pytest.raises(CompressionError, match=SENTENCE):
        _ = connect(delayed_compression="zstd").default_channel.store


# The doctor's report on compression.


def compression(delayed: Delayed) -> Check:
    return {each.name: each for each in check_up(delayed, None, [])}["compression"]


def test_a_doctor_names_the_dictionary(delayed: Delayed, client: redis.Redis) -> None:
    version = client.hget("{celery}:dictionaries", "current").decode()
    expected = f"on in this app; celery has dictionary {version}; the extra zstd is installed"
    assert (compression(delayed).text, compression(delayed).remedy) == (expected, "")
    client.hset("{celery}:dictionaries", "count", 2)
    assert f"{version}, the newest of 2; " in compression(delayed).text
    client.delete("{celery}:dictionaries")
    assert "; no queue is compressed yet; " in compression(delayed).text


def test_a_doctor_says_what_to_install(server: Server, without_extra: None) -> None:
    with make_app(Settings(f"delayed+{server.url}")) as app, closing(Delayed(app)) as delayed:
        found = compression(delayed)
        assert found.text.startswith("off in this app; celery has dictionary ")
        assert found.text.endswith("; the extra zstd is not installed here")
        assert "pip install 'kombu-delayed[zstd]'" in found.remedy


def test_a_doctor_says_nothing_where_it_is_off(server: Server, client: redis.Redis) -> None:
    client.delete("{celery}:dictionaries")
    with make_app(Settings(f"delayed+{server.url}")) as app, closing(Delayed(app)) as delayed:
        assert (compression(delayed).text, compression(delayed).remedy) == ("off", "")


def test_a_doctor_sees_stock_workers(server: Server, delayed: Delayed) -> None:
    with server.client() as stock, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(stock.brpop, ["other"], 30)
        wait_until(lambda: compression(delayed).remedy, "it waits")
        assert compression(delayed).remedy.startswith(
            "1 client waits with BRPOP (client 127.0.0.1:"
        )
        stock.lpush("other", "end")
        waiting.result()
    wait_until(lambda: not compression(delayed).remedy, "it is gone")


def test_a_doctor_says_that_it_sees_no_stock_workers(server: Server, client: redis.Redis) -> None:
    url = f"delayed+{server.url}".replace("//", f"//{BLIND}:{BLIND}@")
    with blind_user(client), make_app(Settings(url)) as app, closing(Delayed(app)) as delayed:
        assert "give the user the right +client|list" in compression(delayed).remedy
