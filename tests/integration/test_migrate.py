"""Moves between the stock transport and ours: a message is in one place at any time."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import click
import pytest
import redis
from click.testing import CliRunner, Result
from kombu import Connection, Exchange, Queue

from celery_ext import Delayed, Query
from kombu_delayed import migrate
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.message.envelope import open_kept
from kombu_delayed.migrate import MigrationRefused, Move, ToDelayed, ToStock, hand_back
from kombu_delayed.migrate import __main__ as command
from kombu_delayed.store.keys import QueueKeys
from kombu_delayed.store.store import CALL_LIMIT, Entry
from kombu_delayed.testing.session import session_server
from tests.kit.backlog import check_backlog
from tests.kit.inbox import Connect, Inbox
from tests.kit.ledger import Ledger
from tests.kit.limited import BLIND, blind_user
from tests.kit.mail import MAIL, in_ms, publish
from tests.kit.servers import Server
from tests.kit.state import seed, state
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

HOUR_MS = 3_600_000


@pytest.fixture
def stock(server: Server) -> Iterator[Connect]:
    """Opens connections of the stock transport; keyword arguments are transport options."""
    with ExitStack() as stack:

        def open_connection(**options: Any) -> Connection:
            return stack.enter_context(Connection(server.url, transport_options=options))

        yield open_connection


@pytest.fixture
def channel(server: Server) -> Iterator[Any]:
    with migrate.open_channel(server.url) as channel:
        yield channel


def hold(connection: Connection, count: int, queue: Queue = MAIL) -> None:
    """Take messages and vanish, as a killed worker does."""
    Inbox(connection, queue, ack=False).receive(count)
    abandon(connection)


def abandon(connection: Connection) -> None:
    connection.default_channel.do_restore = False
    connection.close()


def places(client: redis.Redis, queue: str = "mail", prefix: str = "") -> Counter[str]:
    """Every message of a queue, by its body, however often and wherever it is kept."""
    keys = QueueKeys(queue, prefix)
    texts = [text for key in keys.ready for text in client.lrange(key, 0, -1)]
    texts += [open_kept(record).message for record in client.hvals(keys.messages)]
    for key in client.keys(f"{prefix}{{{queue}}}:unacked:*"):
        texts += [record[1:] for record in client.hvals(key)]
    found = [json.loads(text) for text in texts]
    found += [json.loads(text)[0] for text in client.hvals(f"{prefix}unacked")]
    return Counter(message["body"] for message in found)


def hold_delayed(connection: Connection, *ids: str) -> None:
    """Take messages that are due in an hour, each with its id as its body, and vanish."""
    for id in ids:
        publish(connection, id, headers={"id": id, **in_ms(HOUR_MS)})
    hold(connection, len(ids))


# To delayed: what stock workers held.


def test_held_messages_go_where_they_belong(
    stock: Connect, connection: Connection, channel: Any, client: redis.Redis
) -> None:
    dying = stock()
    for n in range(3):
        publish(dying, f"now {n}", headers={"id": f"n{n}"})
    publish(dying, "later", headers={"id": "a", **in_ms(HOUR_MS)}, priority=6)
    publish(dying, "past", headers={"id": "b", **in_ms(-HOUR_MS)})
    hold(dying, 5)
    publish(stock(), "waiting")
    report = migrate.to_delayed(channel, older_than_seconds=0)
    assert report.moves == {
        Move("mail", "stock unacked", "delayed"): 1,
        Move("mail", "stock unacked", "ready"): 4,
    }
    assert client.exists("unacked", "unacked_index") == 0
    assert set(check_backlog(client, "mail")) == {"a"}
    record = client.hget("{mail}:messages", "a") or b""
    assert record[:1] == b"6"
    kept = json.loads(open_kept(record).message)
    assert kept["headers"]["redelivered"] is True
    assert kept["properties"]["delivery_info"]["redelivered"] is True
    inbox = Inbox(connection, MAIL)
    assert inbox.receive(5) == ["now 0", "now 1", "now 2", "past", "waiting"]
    flags = [message.delivery_info.get("redelivered") for message in inbox.messages]
    assert flags == [True] * 4 + [None]


def test_young_ones_stay(stock: Connect, channel: Any, client: redis.Redis) -> None:
    hold_delayed(stock(), "old", "young", "unknown")
    tags = {
        json.loads(text)[0]["headers"]["id"]: tag for tag, text in client.hgetall("unacked").items()
    }
    client.zadd("unacked_index", {tags["old"]: time.time() - 100})
    client.zrem("unacked_index", tags["unknown"])
    report = migrate.to_delayed(channel, older_than_seconds=50, force=True)
    assert (report.moved, report.young) == (1, 2)
    assert set(check_backlog(client, "mail")) == {"old"}
    assert {*client.hkeys("unacked")} == {tags["young"], tags["unknown"]}
    assert migrate.to_delayed(channel).young == 2, "an hour unless told otherwise"
    assert migrate.to_delayed(channel, older_than_seconds=0).moved == 2


def test_messages_find_their_queues(stock: Connect, channel: Any, client: redis.Redis) -> None:
    news = Exchange("news", type="topic")
    dying = stock()
    keys = [("sports", "sports.#"), ("all", "#"), ("food", "food.*"), ("sports", "*.ball")]
    queues = [Queue(name, news, routing_key=key) for name, key in keys]
    for queue in queues:
        queue(dying.default_channel).declare()
    dying.Producer(exchange=news).publish("goal", routing_key="sports.ball", headers=in_ms(HOUR_MS))
    dying.Producer().publish("direct", routing_key="unbound", headers=in_ms(HOUR_MS))
    Inbox(dying, *queues[:3], Queue("unbound", Exchange("")), ack=False).receive(3)
    abandon(dying)
    report = migrate.to_delayed(channel, older_than_seconds=0)
    # The two copies had one tag, so the stock transport kept one of them.
    expected = dict.fromkeys(("all", "sports", "unbound"), 1)
    assert {move.queue: n for move, n in report.moves.items()} == expected
    assert {queue: client.hlen(f"{{{queue}}}:messages") for queue in expected} == expected
    assert client.exists("unacked", "unacked_index") == 0


def test_what_cannot_be_read_stays(stock: Connect, channel: Any, client: redis.Redis) -> None:
    hold_delayed(stock(), "good")
    good = json.loads(client.hvals("unacked")[0])
    bad = {
        "text": "no JSON",
        "number": "7",
        "short": json.dumps(good[:2]),
        "empty": json.dumps([{}, "mail", "mail"]),
        "odd": json.dumps([good[0], ["mail"], 7]),
        "lost": json.dumps([good[0], "nobody", "knows"]),
    }
    client.hset("unacked", mapping=bad)
    client.zadd("unacked_index", dict.fromkeys(bad, 1))
    client.rpush("mail", "no JSON", json.dumps([1]))
    lists = client.lrange("mail", 0, -1)
    for _ in range(2):
        report = migrate.to_delayed(channel, older_than_seconds=0)
        assert {left.id for left in report.left if left.key == "unacked"} == set(bad)
        assert [left.key for left in report.left].count("mail") == 2
        assert report.left_count == 8
        assert client.lrange("mail", 0, -1) == lists
        assert client.hgetall("unacked") == {k.encode(): v.encode() for k, v in bad.items()}
        assert client.zcard("unacked_index") == len(bad)
    assert client.hlen("{mail}:messages") == 1


def test_a_stock_consumer_that_runs_is_in_the_way(
    stock: Connect, channel: Any, client: redis.Redis
) -> None:
    running = stock()
    publish(running, "one", headers=in_ms(HOUR_MS))
    inbox = Inbox(running, MAIL, ack=False)
    inbox.receive(1)
    inbox.drain(0.05)
    with pytest.raises(MigrationRefused, match="stock consumers are connected: 1"):
        migrate.to_delayed(channel, older_than_seconds=0)
    assert migrate.plan(channel, "to-delayed", older_than_seconds=0).blockers
    assert client.hlen("unacked") == 1
    assert migrate.to_delayed(channel).young == 1, "after the visibility timeout it is no matter"
    assert migrate.to_delayed(channel, older_than_seconds=0, force=True).moved == 1
    inbox.messages[0].ack()


def test_a_user_who_may_not_list_clients_moves_nothing_too_early(
    stock: Connect, client: redis.Redis, server: Server
) -> None:
    publish(stock(), "one", headers=in_ms(HOUR_MS))
    url = server.url.replace("//", f"//{BLIND}:{BLIND}@")
    with blind_user(client), migrate.open_channel(url) as channel:
        with pytest.raises(MigrationRefused, match=r"the right \+client\|list"):
            migrate.to_delayed(channel, older_than_seconds=0)
        migrate.to_delayed(channel)
        client.acl_setuser(BLIND, enabled=True, commands=["+client|list"])
        assert not migrate.plan(channel, "to-delayed", older_than_seconds=0).blockers


# To delayed: ready lists.


@pytest.mark.parametrize("prefix", ["", "shop[1]*:"], ids=["no prefix", "prefix"])
def test_eta_messages_in_ready_lists(
    stock: Connect, connect: Connect, server: Server, client: redis.Redis, prefix: str
) -> None:
    options = {"global_keyprefix": prefix, "priority_steps": [0, 5]}
    producer = stock(**options)
    for n in range(40):
        headers = {"id": str(n), **(in_ms(HOUR_MS) if n % 4 == 1 else {})}
        publish(producer, n, headers=headers, priority=5 * (n % 2))
    publish(producer, "past", headers=in_ms(-HOUR_MS))
    with migrate.open_channel(server.url, **options) as channel:
        report = migrate.to_delayed(channel)
    assert report.moves == {Move("mail", "ready", "delayed"): 10}
    records = client.hgetall(f"{prefix}{{mail}}:messages")
    assert sorted(int(id) for id in records) == list(range(1, 40, 4))
    assert {record[:1] for record in records.values()} == {b"5"}
    left = [n for n in range(40) if n % 4 != 1]
    wanted = [n for n in left if n % 2 == 0] + ["past"] + [n for n in left if n % 2]
    assert Inbox(connect(**options), MAIL).receive(31) == wanted


def test_large_lists_while_others_use_them(
    stock: Connect, channel: Any, client: redis.Redis
) -> None:
    producer = stock()
    count = 3 * CALL_LIMIT
    for n in range(count):
        publish(producer, n, headers={"id": str(n), **(in_ms(HOUR_MS) if n % 3 else {})})
    popped = []
    for step, _ in enumerate(ToDelayed(channel, older_than_seconds=0).steps()):
        publish(producer, count + step, headers={"id": f"new{step}"})
        popped += [json.loads(text)["headers"] for text in client.rpop("mail", 3) or []]
    later = set(check_backlog(client, "mail"))
    later |= {headers["id"] for headers in popped if "eta" in headers}
    assert later == {str(n) for n in range(count) if n % 3}
    assert not any(b'"eta"' in text for text in client.lrange("mail", 0, -1))
    order = [json.loads(text)["headers"]["id"] for text in reversed(client.lrange("mail", 0, -1))]
    plain = [headers["id"] for headers in popped if "eta" not in headers]
    old = [id for id in plain + order if not id.startswith("new")]
    assert old == [str(n) for n in range(0, count, 3)]


# Both directions: dry run, killed, and repeated.


def mixture(stock: Connect, client: redis.Redis, held: int = 20) -> None:
    """Messages wherever the stock transport keeps them."""
    dying = stock()
    for n in range(held):
        publish(dying, f"held {n}", headers={"id": f"h{n}", **in_ms(HOUR_MS * (n % 3))})
    hold(dying, held)
    for n in range(held):
        publish(stock(), f"ready {n}", headers={"id": f"r{n}", **in_ms(HOUR_MS * (n % 2))})


@pytest.mark.parametrize("direction", ["to-delayed", "to-stock"])
def test_a_dry_run_changes_nothing(
    stock: Connect, channel: Any, server: Server, client: redis.Redis, direction: str
) -> None:
    mixture(stock, client)
    if direction == "to-stock":
        migrate.to_delayed(channel, older_than_seconds=0)
    before = state(client)
    planned = migrate.plan(channel, direction, **options_of(direction))  # type: ignore[arg-type]
    result = run(server, direction)
    assert result.exit_code == 0
    assert "Nothing was moved: give --yes" in result.output
    assert state(client) == before
    move = migrate.to_stock if direction == "to-stock" else migrate.to_delayed
    done = move(channel, **options_of(direction))
    assert done.moves == planned.moves
    assert done.moved > 0


def options_of(direction: str) -> dict[str, Any]:
    return {"older_than_seconds": 0} if direction == "to-delayed" else {}


def run(server: Server, direction: str, *arguments: str, **more: Any) -> Result:
    older = ["--older-than", "0"] if direction == "to-delayed" else []
    return CliRunner().invoke(command.main, [direction, server.url, *older, *arguments], **more)


@pytest.mark.parametrize("killed_after", [1, 2, 5])
def test_killed_in_between(
    stock: Connect, channel: Any, client: redis.Redis, killed_after: int
) -> None:
    mixture(stock, client, held=CALL_LIMIT + 50)
    everything = places(client)
    assert len(everything) == sum(everything.values()) == 2 * (CALL_LIMIT + 50)
    for migration in (ToDelayed(channel, older_than_seconds=0), ToStock(channel)):
        for _ in itertools.islice(migration.steps(), killed_after):
            assert places(client) == everything
            check_backlog(client, "mail")
    migrate.to_delayed(channel, older_than_seconds=0)
    assert places(client) == everything
    assert client.exists("unacked", "unacked_index") == 0
    assert migrate.to_delayed(channel, older_than_seconds=0).moved == 0
    migrate.to_stock(channel)
    assert migrate.to_stock(channel).moved == 0
    assert places(client) == everything
    assert not check_backlog(client, "mail")


# To stock.


def test_the_backlog_goes_back_in_order(
    connection: Connection, channel: Any, client: redis.Redis
) -> None:
    for n in (3, 1, 2):
        publish(connection, n, headers={"id": str(n), **in_ms(HOUR_MS * n)}, priority=3)
    publish(connection, "due", headers={"id": "due", **in_ms(50)}, priority=3)
    wait_until(lambda: channel.store.size("mail").due == 1, "the first one is due")
    before = client.hgetall("{mail}:messages")
    report = migrate.to_stock(channel)
    assert report.moves == {Move("mail", "delayed", "ready"): 4}
    texts = [text.decode() for text in reversed(client.lrange("mail\x06\x163", 0, -1))]
    assert texts[0].startswith('{"due_ms":'), "what is due has waited, whoever delivers it"
    kept = [open_kept(before[b"%d" % n]).message for n in (1, 2, 3)]
    assert [text.encode() for text in texts[1:]] == kept
    assert "due" not in state(client)["{mail}:wake"]
    assert not any("delayed" in key or "messages" in key for key in state(client))


def test_a_delay_that_stock_does_not_know_stays(
    connection: Connection, channel: Any, client: redis.Redis
) -> None:
    publish(connection, "plain", headers={"id": "p", "x-delay": HOUR_MS})
    publish(connection, "task", headers={"id": "t", **in_ms(HOUR_MS)})
    due_ms = int(time.time() * 1000) + 2 * HOUR_MS
    moved = json.dumps({"body": "m", "headers": {"id": "m", **in_ms(HOUR_MS)}, "properties": {}})
    channel.store.schedule("mail", [Entry("m", 0, moved, str(due_ms))])
    client.hset("{mail}:messages", "broken", f"0{9 * 10**15}no JSON")
    client.zadd("{mail}:partitions", {"9e15": 9e15})
    client.zadd("{mail}:delayed:9e15", {"broken": 9e15})
    planned = migrate.plan(channel, "to-stock")
    for report in (planned, migrate.to_stock(channel)):
        assert report.moves == {Move("mail", "delayed", "ready"): 1}
        assert {left.id: left.reason[:8] for left in report.left} == {
            "p": "its due ",
            "m": "its due ",
            "broken": "the mess",
        }
    assert set(check_backlog(client, "mail")) == {"p", "m", "broken"}
    assert migrate.to_stock(channel, force=True).moved == 2
    assert set(check_backlog(client, "mail")) == {"broken"}


def test_messages_that_are_cancelled_meanwhile_hide_no_others(
    connection: Connection, channel: Any, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_back, "CALL_LIMIT", 3)
    for n in range(6):
        publish(connection, n, headers={"id": str(n), **in_ms(HOUR_MS * (n + 1))})
    publish(connection, "stays", headers={"id": "x", "x-delay": HOUR_MS // 2})

    class Disturbed(ToStock):
        def _refusal(self, record: bytes, due_ms: int, now_ms: int) -> str:
            Backlog(self.store, "mail").cancel(["1"])
            return super()._refusal(record, due_ms, now_ms)

    report = Disturbed(channel).run()
    assert report.moves == {Move("mail", "delayed", "ready"): 5}
    assert [left.id for left in report.left] == ["x"]
    assert set(check_backlog(client, "mail")) == {"x"}


def test_what_dead_consumers_held_is_reclaimed(
    connection: Connection, channel: Any, client: redis.Redis
) -> None:
    text = json.dumps({"body": "x", "headers": {}, "properties": {}}, separators=(",", ":"))
    seed(
        client,
        {"{mail}:unacked:gone": {"1": "0" + text}, "{mail}:unacked:ended": {"1": "3" + text}},
    )
    client.zadd("{mail}:consumers", {"ended": 5})
    planned = migrate.plan(channel, "to-stock")
    report = migrate.to_stock(channel)
    assert planned.moves == report.moves == {Move("mail", "unacked", "ready"): 2}
    assert client.llen("mail") == client.llen("mail\x06\x163") == 1
    assert not any("unacked" in key or "consumers" in key for key in state(client))


def test_a_consumer_of_ours_that_runs_is_in_the_way(
    connection: Connection, channel: Any, client: redis.Redis, server: Server
) -> None:
    publish(connection, "later", headers=in_ms(HOUR_MS))
    inbox = Inbox(connection, MAIL)
    inbox.drain(0.05)
    with pytest.raises(MigrationRefused, match="of queue 'mail' run on this transport: 1 "):
        migrate.to_stock(channel)
    result = run(server, "to-stock", "--yes")
    assert result.exit_code == 1
    assert "or give --force" in result.output
    assert client.hlen("{mail}:messages") == 1
    assert migrate.to_stock(channel, force=True).moved == 1
    inbox.drain(1.5)
    assert client.hlen("{mail}:messages") == 1, "it has put it back"


# The command line.


def test_the_command_line(
    stock: Connect, server: Server, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture(stock, client)
    answers = iter([False, True])
    with monkeypatch.context() as terminal:
        terminal.setattr(command, "_is_terminal", lambda: True)
        terminal.setattr(click, "confirm", lambda text: next(answers))
        run(server, "to-delayed")
        assert client.exists("{mail}:messages") == 0
        run(server, "to-delayed")
    assert client.hlen("{mail}:messages") == 23
    client.flushall()
    mixture(stock, client)
    result = run(server, "to-delayed", "--yes")
    assert result.exit_code == 0, result.output
    assert result.output.count("stock unacked") == 4, "planned and done"
    assert "Moved:" in result.output
    assert client.hlen("{mail}:messages") == 23
    assert "nothing to move" in run(server, "to-delayed", "--yes").output


def test_without_rich_the_table_is_plain(
    stock: Connect, server: Server, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture(stock, client)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    lines = run(server, "to-delayed").output.splitlines()
    assert lines[0].split() == ["queue", "from", "to", "messages"]
    assert "mail   ready          delayed  10" in lines


def test_options_reach_the_transport(stock: Connect, server: Server, client: redis.Redis) -> None:
    names = {"unacked_key": "held", "unacked_index_key": "held_index"}
    dying = stock(global_keyprefix="shop:", priority_steps=[0, 5], **names)
    publish(dying, "later", headers={"id": "a", **in_ms(HOUR_MS)}, priority=7)
    hold(dying, 1)
    arguments = ["--key-prefix", "shop:", "--priority-steps", "0,5", "--yes"]
    for name, value in names.items():
        arguments += ["--option", f"{name}={value}"]
    assert run(server, "to-delayed", *arguments).exit_code == 0
    (record,) = client.hvals("shop:{mail}:messages")
    assert record[:1] == b"5"
    assert client.exists("shop:held", "shop:held_index") == 0


def test_names_that_look_like_numbers(stock: Connect, server: Server, client: redis.Redis) -> None:
    names = {"unacked_key": "5", "unacked_index_key": "null", "global_keyprefix": "3"}
    dying = stock(**names)
    publish(dying, "later", headers={"id": "a", **in_ms(HOUR_MS)})
    hold(dying, 1)
    options = [text for name, value in names.items() for text in ("--option", f"{name}={value}")]
    assert run(server, "to-delayed", "--yes", *options).exit_code == 0
    assert client.hkeys("3{mail}:messages") == [b"a"]
    assert client.exists("35", "3null") == 0


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--priority-steps", "high", "write numbers"),
        ("--option", "sep", "write name=value"),
        ("--older-than", "-1", "-1"),
        ("--older-than", "nan", "older_than_seconds=nan is not a number of seconds"),
        ("--option", "visibility_timeout=abc", "visibility_timeout='abc' is not a number"),
        ("--option", "delayed_poll_secs=1", "did you mean"),
        ("--option", "unacked_kye=held", "did you mean 'unacked_key'"),
        ("--option", "sep=", "transport option sep takes one or more characters, not ''"),
        ("--option", "queue_order_strategy=json", "the path of a class, not 'json'"),
        (
            "--option",
            "queue_order_strategy=sort",
            "queue_order_strategy takes 'priority', 'round_robin', 'sorted' or the path of a class",
        ),
    ],
)
def test_wrong_options_are_explained(server: Server, option: str, value: str, text: str) -> None:
    result = run(server, "to-delayed", option, value)
    assert result.exit_code != 0
    assert text in result.output
    assert isinstance(result.exception, SystemExit)


def test_every_url_of_the_stock_transport() -> None:
    with session_server() as directory:
        url = f"redis+socket://{directory}/broker.sock?virtual_host=2"
        with Connection(url) as dying:
            publish(dying, "later", headers={"id": "a", **in_ms(HOUR_MS)})
            hold(dying, 1)
        result = CliRunner().invoke(command.main, ["to-delayed", "--older-than", "0", "--yes", url])
        assert result.exit_code == 0, result.output
        with redis.Redis(unix_socket_path=f"{directory}/broker.sock", db=2) as client:
            assert client.hkeys("{mail}:messages") == [b"a"]
    away = "sentinel://127.0.0.1:1;sentinel://127.0.0.1:2"
    result = CliRunner().invoke(command.main, ["to-stock", away, "--option", "master_name=m"])
    assert "no Sentinel reports a running master" in result.output


def test_a_server_that_is_away_is_an_error() -> None:
    result = CliRunner().invoke(command.main, ["to-stock", "redis://127.0.0.1:1/0"])
    assert result.exit_code == 1
    assert "Error: " in result.output


# Real workers.


@pytest.mark.crash
def test_a_killed_stock_workers_tasks_run_once(
    server: Server, tmp_path: Path, channel: Any, client: redis.Redis
) -> None:
    ledger = Ledger(tmp_path / "ledger")
    old = Settings(server.url, None, {}, str(ledger.path))
    new = Settings(f"delayed+{server.url}", None, {}, str(ledger.path))
    eta = datetime.now(timezone.utc) + timedelta(hours=1)
    with Worker(old, tmp_path, name="old") as worker:
        ids = [make_app(old).send_task("record", eta=eta).id for _ in range(20)]
        wait_until(lambda: client.hlen("unacked") == 20, "the stock worker holds all tasks")
        worker.kill()
    report = migrate.to_delayed(channel, older_than_seconds=0)
    assert report.moves == {Move("celery", "stock unacked", "delayed"): 20}
    for due_ms in check_backlog(client, "celery").values():
        assert 0 <= due_ms / 1000 - eta.timestamp() < 0.001
    with closing(Delayed(make_app(new))) as delayed, Worker(new, tmp_path, name="new"):
        delayed.run_now_many(Query())
        ledger.wait_for_all(ids)
    assert ledger.runs() == dict.fromkeys(ids, 1)
    assert client.hlen("unacked") == client.hlen("{celery}:messages") == 0


@pytest.mark.smoke
def test_a_stock_worker_gets_everything_back(server: Server, tmp_path: Path, channel: Any) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ours = make_app(Settings(f"delayed+{server.url}", None, {}, str(ledger.path)))
    eta = datetime.now(timezone.utc) + timedelta(seconds=5)
    ids = [ours.send_task("record", eta=eta, priority=n % 10).id for n in range(20)]
    for move in (migrate.to_stock, migrate.to_delayed, migrate.to_stock):
        assert move(channel, queues=["celery"]).moved == 20
    with Worker(Settings(server.url, None, {}, str(ledger.path)), tmp_path, name="stock"):
        ledger.wait_for_all(ids)
    assert ledger.runs() == dict.fromkeys(ids, 1)
    assert all(entry["at"] >= eta.timestamp() for entry in ledger.entries())
