"""A queue spread over any number of shards is one queue to its users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import VERSION, Connection, Queue

from celery_ext import Delayed, Query
from celery_ext.app.signals import task_cancelled
from celery_ext.control.backup.transfer import RestoreReport
from celery_ext.policies import Fair, Limit
from kombu_delayed import migrate
from kombu_delayed.errors import AlreadyDelayed, OptionError
from kombu_delayed.inspection.dead_letters import DeadLetters
from kombu_delayed.message.envelope import eta_to_ms
from kombu_delayed.migrate import Move, ToStock
from kombu_delayed.store.calls import shards as shards_module
from kombu_delayed.store.calls.shards import shard_name
from kombu_delayed.transport.channel.publishing import lifetimes
from tests.kit.heard import heard
from tests.kit.inbox import Connect, Inbox
from tests.kit.ledger import Ledger
from tests.kit.mail import MAIL
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

NAMES = [shard_name("mail", n) for n in range(12)]
FAR = 3_600

Tasks = Callable[..., Delayed]


def send(connection: Connection, *bodies: Any, **options: Any) -> None:
    producer = connection.Producer(exchange=MAIL.exchange, routing_key="mail")
    for body in bodies:
        producer.publish(body, message_id=str(body), declare=[MAIL], **options)


def send_to(connection: Connection, queue: Queue, body: str) -> None:
    connection.Producer().publish(body, routing_key=queue.name)


def sizes(connection: Connection) -> list[int]:
    store = connection.default_channel.store
    return [sum(store.size(name)) - store.size(name).due for name in NAMES]


@pytest.fixture
def tasks(connect: Connect) -> Iterator[Tasks]:
    """The delayed tasks of an app over so many shards: `0`, `1` …, that many of them new."""
    with ExitStack() as stack:

        def make(shards: int, count: int = 0) -> Delayed:
            connection = connect(delayed_shards={"mail": shards})
            app = mail_app(connection)
            for n in range(count):
                options = {"task_id": str(n), "countdown": FAR + n, "queue": "mail"}
                app.send_task("t", (n,), connection=connection, **options)
            stack.callback(app.close)
            return stack.enter_context(closing(Delayed(app)))

        yield make


def mail_app(connection: Connection) -> Celery:
    app = Celery("shards", broker=connection.as_uri(include_password=True), set_as_current=False)
    app.conf.broker_transport_options = connection.transport_options
    app.conf.task_queues = [MAIL]
    app.conf.task_default_queue = "mail"
    return app


# Kombu.


@pytest.mark.parametrize(
    "given",
    [{"expires": 60}, {"auto_delete": True}, {"exclusive": True}],
    ids=["expires", "auto_delete", "exclusive"],
)
def test_temporary_queues_are_not_spread(
    given: dict[str, Any], connect: Connect, client: redis.Redis
) -> None:
    """Each client would leave the shard count of its queue behind for ever."""
    connection = connect(delayed_shards=3)
    queue = Queue("temporary", durable=False, **given)
    inbox = Inbox(connection, queue)
    send_to(connection, queue, "a")
    assert inbox.receive(1) == ["a"]
    with pytest.raises(connection.channel_errors):
        connection.default_channel.queue_declare("none", passive=True)
    assert not client.keys("*shards*")
    send(connection, "b")
    assert [int(n) for n in client.hvals("kombu-delayed-shards")] == [3]
    assert client.hkeys("kombu-delayed-shards") == [b"mail"]


def test_replies_are_not_spread(connect: Connect, client: redis.Redis) -> None:
    """This includes the program that sends them, which does not declare their queue."""
    connection = connect(delayed_shards=3)
    lifetimes.note("replies", 60_000)
    try:
        connection.SimpleQueue("replies").put("a")
        assert client.llen("replies") == 1
    finally:
        lifetimes.pop("replies")
    assert not client.keys("*shards*")


@pytest.mark.parametrize("headers", [{}, {"x-delay": 3_600_000}])
@pytest.mark.parametrize("batch", [False, True])
def test_messages_are_spread(connect: Connect, headers: dict[str, Any], batch: bool) -> None:
    if batch and VERSION < (5, 7):
        pytest.skip("older Kombu has no batches")
    connection = connect(delayed_shards={"mail": 4})
    producer = connection.Producer(exchange=MAIL.exchange, routing_key="mail")
    MAIL(connection.default_channel).declare()
    with producer.batch() if batch else nullcontext():
        for n in range(80):
            producer.publish(n, message_id=str(n), headers=headers)
    found = sizes(connection)
    assert sum(found) == 80
    assert min(found[:4]) >= 10
    assert found[4:] == [0] * 8


def test_a_queue_that_is_named_like_a_shard_is_refused(connection: Connection) -> None:
    queue = Queue("a\x1fb")
    connection.Producer(routing_key="a\x1fb").publish("x", declare=[queue])
    assert Inbox(connection, queue).receive(1) == ["x"]
    with pytest.raises(OptionError, match=r"that is the name of shard 1 of queue 'a'"):
        Queue("a\x1f1")(connection.default_channel).declare()


def test_who_has_not_heard_of_shards_gets_all(connect: Connect) -> None:
    source = connect(delayed_shards=12)
    send(source, *range(40))
    send(source, *range(40, 60), headers={"x-delay": 50})
    inbox = Inbox(connect(), MAIL, prefetch_count=7, ack=False)
    inbox.receive(7)
    inbox.consumer.channel.close()
    inbox = Inbox(connect(), MAIL, prefetch_count=7)
    assert sorted(inbox.receive(60)) == list(range(60))


def test_priorities_hold_in_a_shard_and_nearly_over_all(connect: Connect) -> None:
    source = connect(delayed_shards=4)
    low, high = [f"low {n}" for n in range(40)], [f"high {n}" for n in range(40)]
    send(source, *low, priority=9)
    send(source, *high, priority=0)
    found = Inbox(connect(), MAIL, prefetch_count=1).receive(80)
    home = source.default_channel.store.shards.home
    for shard in NAMES[:4]:
        there = [body for body in found if home("mail", body) == shard]
        assert there == sorted(there, key=lambda body: body.startswith("low"))
    assert sum(body in high for body in found[:40]) > 30


def test_a_consumer_follows_when_there_are_more(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox(connect(), MAIL)
    send(connect(), "before")
    assert inbox.receive(1) == ["before"]
    send(connect(delayed_shards={"mail": 12}), *range(40))
    assert len(inbox.drain(0.3)) < 41
    monkeypatch.setattr(shards_module, "LOOK_SECONDS", 0)
    monkeypatch.setattr("kombu_delayed.transport.channel.consuming.LOOK_SECONDS", 0)
    inbox.connection.default_channel._shards_at = 0
    assert sorted(map(str, inbox.receive(41))) == sorted(["before", *map(str, range(40))])


def test_a_queue_with_limits_is_not_spread_by_another_process(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker keeps its limits and says why it takes no more; one that starts later is refused."""
    options = {"delayed_policies": {"mail": [Limit(concurrency=1)]}}
    inbox = Inbox(connect(**options), MAIL, ack=False)
    inbox.drain(0.01)
    send(connect(delayed_shards=4), *range(40))
    monkeypatch.setattr(shards_module, "LOOK_SECONDS", 0)
    monkeypatch.setattr("kombu_delayed.transport.channel.consuming.LOOK_SECONDS", 0)
    channel = inbox.connection.default_channel
    channel._shards_at = 0
    for _ in range(5):
        inbox.receive(len(inbox.messages) + 1)[-1]
        assert "Another process spreads queue 'mail' over 4 shards" in caplog.text
        assert channel.consumer.lease.queues == {"mail"}
        inbox.messages[-1].ack()
    for take in (lambda other: Inbox(other, MAIL), lambda other: MAIL(other).get()):
        with pytest.raises(OptionError, match="and 4 shards: such a queue can only have one shard"):
            take(connect(**options))


def test_tenants_have_turns_in_all_shards(connect: Connect) -> None:
    """Turns follow the weights, no matter how much each tenant has waiting."""
    fair = {"delayed_policies": {"mail": [Fair(weights={"light": 2})]}}
    connection = connect(**fair, delayed_shards={"mail": 12})
    waiting = {"flood": 1_500, "some": 500, "light": 600}
    for tenant, count in waiting.items():
        send(connection, *(f"{tenant}-{n}" for n in range(count)), headers={"tenant": tenant})
    inbox = Inbox(connection, MAIL, prefetch_count=8)
    inbox.receive(800)
    tenants = [message.headers["tenant"] for message in inbox.messages]
    for first in (0, 400):
        found = Counter(tenants[first : first + 400])
        assert found["light"] == pytest.approx(200, rel=0.1)
        assert found["some"] == pytest.approx(100, rel=0.1)
        assert found["flood"] == pytest.approx(100, rel=0.1)


def test_size_purge_and_delete(connect: Connect, client: redis.Redis) -> None:
    connection = connect(delayed_shards=4)
    send(connection, *range(30))
    channel = connection.default_channel
    assert channel.queue_declare("mail", passive=True).message_count == 30
    assert channel._has_queue("mail")
    assert channel.queue_purge("mail") == 30
    assert sizes(connection) == [0] * 12
    send(connection, *range(30), headers={"x-delay": 3_600_000})
    assert channel.queue_delete("mail", if_empty=True) is None
    assert sum(sizes(connection)) == 30
    channel.queue_delete("mail")
    assert client.keys("*mail*") == []
    assert client.hgetall("kombu-delayed-shards") == {}


def test_what_is_dropped_is_in_all_shards(connect: Connect) -> None:
    """This includes shards that another process has just made; they are not overlooked."""
    many, channel = connect(delayed_shards=4), connect().default_channel
    MAIL(channel).declare()
    send(many, *range(30))
    assert channel.queue_purge("mail") == 30
    other = connect().default_channel
    MAIL(other).declare()
    channel.queue_delete("mail")
    MAIL(other).declare()
    send(connect(delayed_shards=4), *range(3), headers={"x-delay": 3_600_000})
    other.queue_delete("mail", if_empty=True)
    assert sum(sizes(many)) == 3


def test_get_looks_into_all(connect: Connect) -> None:
    connection = connect(delayed_shards=6)
    send(connection, *range(30))
    queue = MAIL(connection.default_channel)
    found = [queue.get(no_ack=True).payload for _ in range(30)]
    assert sorted(found) == list(range(30))
    assert queue.get() is None


@pytest.mark.parametrize("prefetch_count", [1, 5])
def test_each_queue_has_its_share(connect: Connect, prefetch_count: int) -> None:
    """Four shards are not served four times as often as the single shard of another queue."""
    connection = connect(delayed_shards={"mail": 4})
    send(connection, *range(200))
    other = Queue("other")
    producer = connection.Producer(routing_key="other")
    for _ in range(200):
        producer.publish("other", declare=[other])
    inbox = Inbox(connection, MAIL, other, prefetch_count=prefetch_count)
    counts = Counter(body == "other" for body in inbox.receive(160)[:160])
    assert counts[True] >= 70
    assert counts[False] >= 70


def test_one_unique_key_over_all_shards(connect: Connect) -> None:
    sender = connect(delayed_shards=12)
    headers = {"x-delay": 3_600_000, "delayed_unique": "k"}
    send(sender, "first", headers=headers)
    for n in range(20):
        with pytest.raises(AlreadyDelayed):
            send(sender, f"other {n}", headers=headers)
    assert sum(sizes(sender)) == 1


@pytest.mark.parametrize("dry", [True, False])
def test_the_stock_transport_gets_all(connect: Connect, server: Server, dry: bool) -> None:
    sender = connect(delayed_shards=5)
    send(sender, *range(30), headers={"x-delay": 3_600_000})
    send(sender, *range(30, 60))
    with migrate.open_channel(server.url) as channel:
        report = ToStock(channel, dry=dry, force=True).run()
    moved = Counter({name: count for (_, name, _), count in report.moves.items()})
    assert report.moves.keys() >= {Move("mail, shard 4", "ready", "ready")}
    assert moved.keys() == {"delayed", "ready"}
    if dry:
        assert sum(sizes(sender)) == 60
        return
    with Connection(server.url) as stock:
        assert sorted(Inbox(stock, MAIL).receive(60)) == list(range(60))
    assert sizes(sender) == [0] * 12


def test_the_stock_transport_gets_what_is_in_shards_whose_number_is_lost(
    connect: Connect, server: Server, client: redis.Redis
) -> None:
    send(connect(delayed_shards=5), *range(30), headers={"x-delay": 3_600_000})
    client.delete("kombu-delayed-shards")
    with migrate.open_channel(server.url) as channel:
        ToStock(channel, force=True).run()
    assert client.llen("mail") == 30


def test_dead_letters_of_all_shards(connect: Connect) -> None:
    connection = connect(delayed_shards=6)
    send(connection, *range(30))
    inbox = Inbox(connection, MAIL, ack=False)
    inbox.receive(30)
    for message in inbox.messages:
        message.reject()
    dead = DeadLetters(connection, "mail")
    wait_until(lambda: len(dead) == 30, "all are buried")
    assert sorted(each.id for each in dead) == sorted(map(str, range(30)))
    assert dead.get("7") is not None
    assert dead.purge(["7", "8"]) == 2
    assert dead.get("7") is None
    assert dead.replay() == 28
    inbox.messages.clear()
    inbox.acks = True
    assert len(inbox.receive(28)) == 28


# Celery.


@pytest.mark.parametrize("now", [1, 7, 12])
def test_a_task_is_found_where_it_was_before_the_number_changed(tasks: Tasks, now: int) -> None:
    tasks(7, 40)
    delayed = tasks(now)
    info = delayed.get("3")
    assert info is not None
    assert (info.id, info.queue, info.state) == ("3", "mail", "delayed")
    assert delayed.get("missing") is None
    assert delayed.reschedule("3", countdown=60)
    assert delayed.run_now("3")
    assert delayed.cancel_ids(map(str, range(4, 40))) == {str(n) for n in range(4, 40)}
    assert sum(each.delayed for each in delayed.counts().values()) == 3


def test_tasks_of_each_shard_are_spread_over_the_whole_period(tasks: Tasks) -> None:
    delayed, period_ms = tasks(3, 30), 1_800_000
    query, to = Query(queue="mail"), "2100-01-01T00:00:00Z"
    assert delayed.reschedule_many(query, to=to, spread=period_ms / 1000).changed == 30
    start_ms = eta_to_ms(to)
    for shard in delayed.shards("mail"):
        dues = [each.kept.due_ms for page in delayed.backlog(shard).pages() for each in page]
        step_ms = period_ms / len(dues)
        assert 0 <= dues[0] - start_ms < step_ms
        assert {round((b - a) / step_ms, 3) for a, b in pairwise(dues)} == {1}
    order = [int(info.id) for info in sorted(delayed.find(query), key=lambda info: info.due_ms)]
    assert max(abs(n - place) for place, n in enumerate(order)) < 10  # they were due in this order


@pytest.mark.parametrize("is_heard", [False, True])
def test_every_copy_of_a_task_is_found(tasks: Tasks, is_heard: bool) -> None:
    """A task sent again when there were fewer shards is in the queue twice."""
    tasks(7, 12)
    delayed = tasks(3, 12)
    ids = [str(n) for n in range(12)]
    assert 12 < sum(each.delayed for each in delayed.counts().values()) <= 24
    assert delayed.change("0", eta="2100-01-01T00:00:00Z")
    for id in ids[1:]:
        assert delayed.reschedule(id, eta="2100-01-01T00:00:00Z")
    assert list(delayed.find(due_before="2099-01-01T00:00:00Z")) == []
    with ExitStack() as stack:
        told = stack.enter_context(heard(task_cancelled)) if is_heard else None
        assert delayed.cancel_ids(ids) == {*ids}
    assert told is None or len(told) > 12
    assert list(delayed.find()) == []
    assert not delayed.cancel("0")


def test_the_whole_queue(tasks: Tasks) -> None:
    delayed = tasks(5, 50)
    assert delayed.queues() == ["mail"]
    assert delayed.shards() == NAMES[:5]
    assert delayed.counts()["mail"].delayed == 50
    assert delayed.forecast(hours=2).total == 50
    assert sorted(info.id for info in delayed.find(task="t")) == sorted(map(str, range(50)))
    assert {info.queue for info in delayed.find()} == {"mail"}
    outcome = delayed.cancel_many(Query(task="t"))
    assert (outcome.changed, outcome.queues) == (50, {"mail": 50})
    told = [each for each in delayed.events() if each.event == "cancelled"]
    assert {(each.queue, each.stream) for each in told} == {("mail", name) for name in NAMES[:5]}
    assert len({each.shard for each in told}) == 5


def test_a_consumer_is_listed_once(connect: Connect, tasks: Tasks) -> None:
    delayed = tasks(5)
    send(delayed.connection, *range(25))
    inbox = Inbox(connect(), MAIL, ack=False)
    inbox.receive(25)
    (info,) = delayed.consumers()
    assert (info.queue, info.unacked) == ("mail", 25)
    assert delayed.counts()["mail"].unacked == 25


@pytest.mark.parametrize(("before", "after"), [(3, 5), (4, 1)])
def test_a_backup_onto_another_number(
    tasks: Tasks, tmp_path: Path, client: redis.Redis, before: int, after: int
) -> None:
    path = tmp_path / "file"
    delayed = tasks(before, 60)
    unique = {"delayed_unique": "k"}
    delayed.app.send_task("t", task_id="u", countdown=FAR, queue="mail", headers=unique)
    assert delayed.backup(path).queues == {"mail": 61}
    client.flushdb()
    other = tasks(after)
    assert other.restore(path) == RestoreReport(61, 0, 0, {"mail": 61})
    assert [n > 0 for n in sizes(other.connection)] == [n < after for n in range(12)]
    assert all(other.cancel(str(n)) for n in range(60))
    with pytest.raises(AlreadyDelayed):
        other.app.send_task("t", task_id="v", countdown=FAR, queue="mail", headers=unique)


def test_what_waits_in_another_shard_is_not_restored(tasks: Tasks, tmp_path: Path) -> None:
    delayed = tasks(3, 60)
    delayed.backup(tmp_path / "file")
    other = tasks(7)
    other.cancel("5")
    report = other.restore(tmp_path / "file")
    assert (report.messages, report.already) == (1, 59)
    assert other.counts()["mail"].delayed == 60


def test_workers(server: Server, ledger: Ledger, tmp_path: Path) -> None:
    options = {"delayed_shards": {"celery": 12}}
    settings = Settings(f"delayed+{server.url}", None, options, str(ledger.path))
    with make_app(settings) as app, Worker(settings, tmp_path, pool="prefork", concurrency=2):
        sent = [app.send_task("record", countdown=n % 3 / 10).id for n in range(60)]
        ledger.wait_for_all(sent)
    assert sorted(ledger.ids()) == sorted(sent)


def test_messages_in_shards_that_the_server_has_forgotten(
    tasks: Tasks, client: redis.Redis
) -> None:
    """A process that lists the queues finds them and informs all others."""
    tasks(4, 12)
    client.delete("kombu-delayed-shards")
    assert tasks(1).counts("mail")["mail"].delayed < 12
    assert tasks(1).counts()["mail"].delayed == 12
    assert tasks(1).counts("mail")["mail"].delayed == 12
