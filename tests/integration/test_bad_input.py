"""Bad input: a clear answer each, and the message behind it is delivered."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection, Exchange, Queue

from kombu_delayed.inspection.dead_letters import DeadLetters
from kombu_delayed.store.store import Limits, Store
from tests.kit.backlog import check_backlog
from tests.kit.inbox import Inbox
from tests.kit.ledger import Ledger
from tests.kit.servers import Server
from tests.kit.state import all_keys
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

OMIT = object()
DEPTH = 100_000
#: All that can be scheduled is due by then.
END_OF_TIME = "+999999999999999"


# Messages, as text in a ready list.


def text(id: str = "bad", **members: Any) -> bytes:
    """A message as Kombu writes it, with other members or without some."""
    changed = {name.replace("content_", "content-"): value for name, value in members.items()}
    envelope = {
        "body": json.dumps(id),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"id": id},
        "properties": properties(),
        **changed,
    }
    return json.dumps({k: v for k, v in envelope.items() if v is not OMIT}).encode()


def properties(**members: Any) -> dict[str, Any]:
    usual = {"delivery_tag": "t", "delivery_info": {"exchange": "", "routing_key": "q"}}
    return {k: v for k, v in {**usual, **members}.items() if v is not OMIT}


def with_tail(members: str) -> bytes:
    return text()[:-1] + members.encode() + b"}"


def with_header(value: str) -> bytes:
    return text().replace(b'"id": "bad"', b'"id": "bad", ' + value.encode())


GOOD = text("good")

BURIED = {
    "not JSON": (b"good morning", "not JSON"),
    "pickle": (b"\x80\x04K\x01.", "not JSON"),
    "invalid UTF-8": (b'{"body": "\xff"}', "not JSON"),
    "UTF-16": (text().decode().encode("utf-16"), "not JSON"),
    "byte order mark": (b"\xef\xbb\xbf" + text(), "not JSON"),
    "nothing": (b"", "not JSON"),
    "NUL": (b"\0", "not JSON"),
    "cut off": (text()[:-1], "not JSON"),
    "two": (text() + text(), "not JSON"),
    "list": (b"[1, 2]", "not a JSON object but list"),
    "number": (b"7", "not a JSON object but int"),
    "infinity": (b"Infinity", "not a JSON object but float"),
    "null": (b"null", "not a JSON object but NoneType"),
    "string": (b'"{}"', "not a JSON object but str"),
    "empty object": (b"{}", "no properties"),
    "deep lists": (b"[" * DEPTH + b"]" * DEPTH, "not JSON"),
    "open lists": (b"[" * DEPTH, "not JSON"),
    "deep objects": (b'{"properties":' * DEPTH + b"{}" + b"}" * DEPTH, "not JSON"),
    "deep header": (with_header('"x":' + "[" * DEPTH + "]" * DEPTH), "not JSON"),
    "10**5000": (with_tail(',"x":1' + "0" * 5000), "not JSON"),
    "unknown type": (with_header('"x":{"__type__":"\\ud800","__value__":1}'), "not JSON"),
    "unknown type of much": (
        with_header('"x":{"__type__":"x","__value__":"' + "y" * 100_000 + '"}'),
        "not JSON",
    ),
    "bad decimal": (with_header('"x":{"__type__":"decimal","__value__":"x"}'), "not JSON"),
    "no properties": (text(properties=OMIT), "no properties"),
    "properties null": (text(properties=None), "no properties"),
    "properties list": (text(properties=[]), "no properties"),
    "headers list": (text(headers=[]), "headers are not an object"),
    "headers text": (text(headers="id"), "headers are not an object"),
    "delivery_info null": (text(properties=properties(delivery_info=None)), "delivery_info"),
    "delivery_info text": (text(properties=properties(delivery_info="x")), "delivery_info"),
}

DELIVERED = {
    "headers null": text(headers=None),
    "no headers": text(headers=OMIT),
    "no delivery_info": text(properties=properties(delivery_info=OMIT)),
    "no delivery_tag": text(properties=properties(delivery_tag=OMIT)),
    "delivery_tag list": text(properties=properties(delivery_tag=[1])),
    "no body": text(body=OMIT),
    "body null": text(body=None),
    "body number": text(body=7),
    "body list": text(body=[1]),
    "body object": text(body={"x": 1}),
    "content-encoding base99": text(content_encoding="base99"),
    "content-encoding number": text(content_encoding=9),
    "content-type unknown": text(content_type="application/x-nothing"),
    "content-type number": text(content_type=7),
    "1e400": with_tail(',"x":1e400'),
    "NaN": with_tail(',"x":NaN,"y":Infinity,"z":-Infinity'),
    "due_ms twice": with_tail(',"due_ms":1,"due_ms":2'),
    "due_ms text": with_tail(',"due_ms":"soon"'),
    "due_ms list": with_tail(',"due_ms":[]'),
    "due_ms NaN": with_tail(',"due_ms":NaN'),
    "due_ms 1e400": with_tail(',"due_ms":1e400'),
    "deliveries text": with_tail(',"deliveries":"3"'),
    "deliveries negative": with_tail(',"deliveries":-3'),
    "deliveries float": with_tail(',"deliveries":1e400'),
    "deliveries object": with_tail(',"deliveries":{}'),
    "deliveries true": with_tail(',"deliveries":true'),
    "deliveries twice": with_tail(',"deliveries":1,"deliveries":1'),
    "members twice": with_tail(',"headers":{},"properties":{}'),
    "eta text": text(headers={"eta": "soon"}),
    "eta list": text(headers={"eta": []}),
    "eta long": text(headers={"eta": "9" * 10_240}),
    "eta year 1": text(headers={"eta": "0001-01-01T00:00:00+14:00"}),
    "eta year 10000": text(headers={"eta": "10000-01-01T00:00:00"}),
    "x-delay NaN": with_header('"x-delay":NaN'),
    "x-delay 1e400": with_header('"x-delay":1e400'),
    "x-delay object": text(headers={"x-delay": {}}),
    "id surrogate": text(headers={"id": "\ud800"}),
    "id list": text(headers={"id": [["x"]]}),
    "id deep": with_header('"x":1,"id":' + "[" * 900 + "]" * 900),
    "id NUL": text(headers={"id": "a\0b"}),
    "id long": text(headers={"id": "{}\n" * 3_500}),
    "space in front": b" \n\t" + text(),
    "line feed behind": text() + b"\n",
}

#: What stock delivers as well, but is taken for poison once it was not acked.
OVERDONE = {
    "deliveries 19": with_tail(',"deliveries":19'),
    "deliveries huge": with_tail(',"deliveries":' + "9" * 400),
}

UNREADABLE = {
    "base64": (text(properties=properties(body_encoding="base64")), "padding|base64"),
    "body_encoding unknown": (text(properties=properties(body_encoding="base99")), "decode"),
    "body_encoding list": (text(properties=properties(body_encoding=[1])), "lower"),
}


# Consumers.


Way = Callable[[Connection, int], list[Any]]


def drain(connection: Connection, count: int, no_ack: bool = False) -> list[Any]:
    """So many messages, and what comes right behind them, through `drain_events`."""
    inbox = Inbox(connection, Queue("q"), no_ack=no_ack)
    wait_until(lambda: drained(connection, inbox) >= count, f"{count} are delivered")
    drained(connection, inbox)
    inbox.consumer.cancel()
    return inbox.messages


def drained(connection: Connection, inbox: Inbox) -> int:
    with contextlib.suppress(socket.timeout):
        for _ in range(20):
            connection.drain_events(timeout=0.02)
    return len(inbox.messages)


def get(connection: Connection, _: int = 0, no_ack: bool = False) -> list[Any]:
    """All that is there, through `basic_get`."""
    messages = []
    while len(messages) < 20 and (found := connection.default_channel.basic_get("q", no_ack)):
        messages.append(found)
        if not no_ack:
            found.ack()
    return messages


def simple(connection: Connection, count: int) -> list[Any]:
    """So many messages, through `SimpleQueue`, whose `get` also decodes."""
    with contextlib.closing(connection.SimpleQueue("q")) as queue:
        messages = [queue.get(timeout=60) for _ in range(count)]
        for message in messages:
            message.ack()
        with pytest.raises(queue.Empty):
            queue.get_nowait()
    return messages


WAYS: dict[str, Way] = {
    "drain": drain,
    "drain no_ack": lambda connection, count: drain(connection, count, True),
    "get": get,
    "get no_ack": lambda connection, count: get(connection, count, True),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def named(table: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", table.values(), ids=list(table))


def push(client: redis.Redis, *texts: bytes) -> None:
    for each in texts:
        client.lpush("q", each)


def left(client: redis.Redis, queue: str = "q") -> dict[str, int]:
    """How many messages are where, states without any left out."""
    held = client.keys(f"{{{queue}}}:unacked:*")
    found = {
        "ready": client.llen(queue),
        "delayed": client.hlen(f"{{{queue}}}:messages"),
        "unacked": sum(client.hlen(key) for key in held),
        "dead": client.zcard(f"{{{queue}}}:dead"),
    }
    return {state: count for state, count in found.items() if count}


def only_dead(connection: Connection) -> Any:
    (letter,) = DeadLetters(connection, "q")
    return letter


# What others have pushed into a ready list.


@named(BURIED)
def test_no_message_is_buried(
    case: tuple[bytes, str],
    way: Way,
    connection: Connection,
    client: redis.Redis,
) -> None:
    bad, reason = case
    push(client, bad, GOOD)
    assert [message.body for message in way(connection, 1)] == [b'"good"']
    letter = only_dead(connection)
    assert letter.message == bad
    assert reason in letter.reason
    assert len(letter.reason) < 1000
    assert left(client) == {"dead": 1}


@named(DELIVERED | OVERDONE)
def test_odd_message_is_delivered_as_stock_would(
    case: bytes,
    way: Way,
    connection: Connection,
    client: redis.Redis,
) -> None:
    push(client, case, GOOD)
    bad, good = way(connection, 2)
    expected = json.loads(case)
    body = expected.get("body")
    assert bad.body == (body.encode() if isinstance(body, str) else body)
    assert bad.content_type == expected["content-type"]
    assert bad.headers.items() >= (expected.get("headers") or {}).items() or "NaN" in str(expected)
    assert good.body == b'"good"'
    assert left(client) == {}


def test_simple_queue_goes_on(connection: Connection, client: redis.Redis) -> None:
    push(client, BURIED["not JSON"][0], DELIVERED["no body"], BURIED["null"][0], GOOD)
    assert [message.payload for message in simple(connection, 2)] == [None, "good"]
    assert left(client) == {"dead": 2}


@named(UNREADABLE)
def test_unreadable_body_is_buried(
    case: tuple[bytes, str], connection: Connection, client: redis.Redis
) -> None:
    bad, reason = case
    push(client, bad, GOOD)
    assert [message.body for message in drain(connection, 1)] == [b'"good"']
    letter = only_dead(connection)
    assert letter.message == bad
    assert re.search(reason, letter.reason)
    assert left(client) == {"dead": 1}


@named(UNREADABLE)
def test_unreadable_body_is_buried_and_told_to_who_gets_it(
    case: tuple[bytes, str], connection: Connection, client: redis.Redis
) -> None:
    bad, reason = case
    push(client, bad, GOOD)
    with pytest.raises((ValueError, AttributeError), match=f"(?i){reason}"):
        get(connection)
    assert [message.body for message in get(connection)] == [b'"good"']
    assert only_dead(connection).message == bad
    assert left(client) == {"dead": 1}


@named(UNREADABLE)
def test_unreadable_body_is_buried_without_acks(
    case: tuple[bytes, str], connection: Connection, client: redis.Redis
) -> None:
    bad, reason = case
    push(client, bad, GOOD)
    assert [message.body for message in drain(connection, 1, no_ack=True)] == [b'"good"']
    letter = only_dead(connection)
    assert letter.message == bad
    assert re.search(reason, letter.reason)


@named(DELIVERED | OVERDONE)
def test_odd_message_is_rejected(case: bytes, connection: Connection, client: redis.Redis) -> None:
    push(client, case, GOOD)
    inbox = Inbox(connection, Queue("q"), ack=False)
    wait_until(lambda: drained(connection, inbox) == 2, "both are delivered")
    inbox.messages[0].reject()
    inbox.messages[1].ack()
    inbox.consumer.cancel()
    letter = only_dead(connection)
    assert letter.reason == "rejected"
    assert letter.message == case
    assert left(client) == {"dead": 1}


@named(DELIVERED)
def test_odd_message_is_requeued(case: bytes, connection: Connection, client: redis.Redis) -> None:
    push(client, case, GOOD)
    inbox = Inbox(connection, Queue("q"), ack=False)
    wait_until(lambda: drained(connection, inbox) == 2, "both are delivered")
    inbox.messages[0].requeue()
    wait_until(lambda: drained(connection, inbox) == 3, "one is delivered again")
    first, good, again = inbox.messages
    assert again.body == first.body
    assert again.delivery_info["redelivered"] is True
    good.ack()
    again.ack()
    inbox.consumer.cancel()
    assert left(client) == {}


def die_with_all(store: Store, count: int) -> int:
    """A consumer takes so many and its lease ends."""
    store.now = "1000"
    answer = store.deliver("q", "A", count, 1, lease_ms=100)
    assert answer is not None
    assert len(answer.records) == count
    store.now = "1100"
    return store.leases.reclaim("q", "A")


@named(DELIVERED | {name: bad for name, (bad, _) in UNREADABLE.items()})
def test_what_kills_its_consumers_is_counted_and_buried(
    case: bytes, store: Store, client: redis.Redis
) -> None:
    store.limits = Limits(max_deliveries=3)
    push(client, case)
    for _ in range(3 - case.endswith(b'"deliveries":1}')):
        assert left(client) == {"ready": 1}
        assert die_with_all(store, 1) == 1
    assert left(client) == {"dead": 1}


@named(OVERDONE)
def test_what_counts_as_tried_too_often_is_buried(
    case: bytes, store: Store, client: redis.Redis
) -> None:
    push(client, case, GOOD)
    assert die_with_all(store, 2) == 2
    assert left(client) == {"ready": 1, "dead": 1}
    (id,) = store.dead.ids("q")
    (letter,) = store.dead.letters("q", [id])
    assert "times without success" in letter.reason
    assert letter.message == case


@named(OVERDONE)
def test_any_count_goes_on_where_there_is_no_limit(
    case: bytes, store: Store, client: redis.Redis
) -> None:
    store.limits = Limits(max_deliveries=0)
    push(client, case)
    lengths = {die_with_all(store, 1) and len(client.lindex("q", 0)) for _ in range(3)}
    assert len(lengths) == 1
    assert json.loads(client.lindex("q", 0))["deliveries"] > 19


@pytest.mark.parametrize("space", ["", " ", "\n\t "])
@pytest.mark.parametrize(
    "header",
    [{"eta": "9999-12-31T23:59:59"}, {"eta": "9999-12-31T24:00:00"}, {"x-delay": 3_600_000}],
)
@pytest.mark.parametrize("tail", ["", ',"due_ms":"soon"', ',"due_ms":null', ',"due_ms":1.5'])
def test_not_yet_due_waits(
    space: str,
    header: dict[str, Any],
    tail: str,
    way: Way,
    connection: Connection,
    client: redis.Redis,
) -> None:
    early = text(headers={"id": "bad", **header})[:-1] + tail.encode() + b"}"
    push(client, space.encode() + early + space.encode(), GOOD)
    assert [message.body for message in way(connection, 1)] == [b'"good"']
    assert left(client) == {"delayed": 1}
    connection.default_channel.store.now = END_OF_TIME
    assert [message.body for message in way(connection, 1)] == [b'"bad"']
    assert left(client) == {}


def test_all_of_it_at_once(connection: Connection, client: redis.Redis) -> None:
    bad = [case for case, _ in (*BURIED.values(), *UNREADABLE.values())]
    odd = [*DELIVERED.values(), *OVERDONE.values()]
    push(client, *bad, *odd, GOOD)
    inbox = Inbox(connection, Queue("q"), prefetch_count=7)
    wait_until(
        lambda: drained(connection, inbox) and inbox.messages[-1].body == b'"good"',
        "the last one is delivered",
    )
    assert drained(connection, inbox) == len(odd) + 1
    inbox.consumer.cancel()
    assert left(client) == {"dead": len(bad)}


# What is published.


BINARY = {"content_type": "application/data", "content_encoding": "binary"}


def publish(connection: Connection, queue: Queue, body: Any = "news", **options: Any) -> None:
    producer = connection.Producer(exchange=queue.exchange, routing_key="k")
    producer.publish(body, declare=[queue], **options)


def arrives_once(connection: Connection, client: redis.Redis, queue: str, delayed: bool) -> None:
    assert left(client, queue) == {"delayed" if delayed else "ready": 1}
    channel = connection.default_channel
    if delayed:
        assert channel.basic_get(queue) is None
        channel.store.now = END_OF_TIME
    message = channel.basic_get(queue)
    assert message.payload == "news"
    message.ack()
    assert channel.basic_get(queue) is None
    connection.release()
    known = [key for key in all_keys(client) if not key.startswith("_kombu.binding")]
    assert [key for key in known if not key.endswith(":wake")] == []


def q(name: str = "q") -> Queue:
    return Queue(name, Exchange("x"), routing_key="k")


@pytest.mark.parametrize(
    ("eta", "delayed"),
    [
        ("not a time", False),
        ("", False),
        ("0001-01-01T00:00:00", False),
        ("0001-01-01T00:00:00+14:00", False),
        ("9999-12-31T23:59:59.999999", True),
        ("9999-12-31T23:59:59-14:00", True),
        ("9999-12-31T24:00:00", True),
        ("9" * 10_240, False),
        ("\ud800", False),
        (7, False),
        (1e300, False),
        (math.nan, False),
        (["2099-01-01"], False),
        ({"x": 1}, False),
        (True, False),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_eta(eta: Any, delayed: bool, connection: Connection, client: redis.Redis) -> None:
    publish(connection, q(), headers={"eta": eta})
    arrives_once(connection, client, "q", delayed)


@pytest.mark.parametrize(
    ("delay", "delayed"),
    [
        (math.nan, False),
        (math.inf, False),
        (-math.inf, False),
        (-5, False),
        ("abc", False),
        ("120000", True),
        (True, False),
        (1e300, True),
        (10**400, False),
        (None, False),
        ([], False),
        ("\ud800", False),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_delay(delay: Any, delayed: bool, connection: Connection, client: redis.Redis) -> None:
    publish(connection, q(), headers={"x-delay": delay})
    arrives_once(connection, client, "q", delayed)


def test_number_that_nothing_can_write_is_refused(
    connection: Connection, client: redis.Redis
) -> None:
    with pytest.raises(ValueError, match="4300 digits"):
        publish(connection, q(), headers={"x-delay": 10**5000})
    assert left(client) == {}


IDS = {
    "braces": "{x}",
    "line feed": "a\nb",
    "NUL": "a\0b",
    "suffix": "a\x1f2",
    "suffix alone": "\x1f2",
    "long": "x" * 10_240,
    "not ASCII": "ü\u4e2d😀",
    "surrogate": "\ud800",
    "half a pair": "a\udc00b",
    "empty": "",
    "number": 7,
    "list": ["a"],
    "true": True,
}


@named(IDS)
@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("place", ["task id", "message id"])
def test_id(
    case: Any, place: str, delayed: bool, connection: Connection, client: redis.Redis
) -> None:
    headers = {"x-delay": 60_000} if delayed else {}
    if place == "task id":
        publish(connection, q(), headers={"id": case, **headers})
    else:
        publish(connection, q(), headers=headers, message_id=case)
    arrives_once(connection, client, "q", delayed)


@pytest.mark.parametrize("order", sorted(set(itertools.permutations(["a", "a", "a", "a\x1f2"]))))
def test_id_that_looks_like_another_s_duplicate(
    order: list[str], connection: Connection, client: redis.Redis
) -> None:
    for n, id in enumerate(order):
        publish(connection, q(), n, headers={"id": id, "x-delay": 60_000 + n})
    assert left(client) == {"delayed": len(order)}
    check_backlog(client, "q")
    connection.default_channel.store.now = END_OF_TIME
    assert [message.payload for message in get(connection)] == [*range(len(order))]
    connection.release()
    assert [key for key in all_keys(client) if "binding" not in key] in ([], ["{q}:wake"])


@named(IDS)
@pytest.mark.parametrize("delayed", [True, False])
def test_id_of_a_dead_letter(
    case: Any, delayed: bool, connection: Connection, client: redis.Redis
) -> None:
    publish(connection, q(), headers={"id": case, **({"x-delay": 60_000} if delayed else {})})
    connection.default_channel.store.now = END_OF_TIME
    connection.default_channel.basic_get("q").reject()
    letters = DeadLetters(connection, "q")
    assert letters.get(only_dead(connection).id) is not None
    assert letters.replay([only_dead(connection).id]) == 1
    message = connection.default_channel.basic_get("q")
    assert message.payload == "news"
    message.ack()
    assert left(client) == {}


QUEUES = {
    "braces": "a{b}c",
    "tag": "{q}",
    "wrong way": "}{",
    "space": "a b",
    "only space": " ",
    "line feed": "a\nb",
    "NUL": "a\0b",
    "colon": "a:b",
    "pattern": "*[%d]?",
    "not ASCII": "ü\u4e2d😀",
    "long": "x" * 10_240,
}


@named(QUEUES)
@pytest.mark.parametrize("delayed", [True, False])
def test_queue_name(case: str, delayed: bool, connection: Connection, client: redis.Redis) -> None:
    publish(connection, q(case), headers={"x-delay": 60_000} if delayed else {})
    arrives_once(connection, client, case, delayed)


@pytest.mark.parametrize("name", ["\ud800", "a\x06\x163"], ids=["surrogate", "separator"])
@pytest.mark.parametrize("delayed", [True, False])
def test_queue_name_is_refused(
    name: str, delayed: bool, connection: Connection, client: redis.Redis
) -> None:
    with pytest.raises(ValueError, match=r"surrogates|cannot be named"):
        publish(connection, q(name), headers={"x-delay": 60_000} if delayed else {})
    assert [key for key in all_keys(client) if not key.startswith("_kombu.binding")] == []


@pytest.mark.parametrize("headers", [{}, {"x-delay": 20}], ids=["now", "delayed"])
def test_body_of_64_mib(
    headers: dict[str, Any], connection: Connection, client: redis.Redis
) -> None:
    body = bytes(range(256)) * (64 * 2**20 // 256)
    publish(connection, q(), body, headers=headers, **BINARY)
    store = connection.default_channel.store
    wait_until(lambda: any(store.size("q")[:2]), "it can be delivered")
    message = connection.default_channel.basic_get("q")
    assert message.body == body
    if headers:
        message.requeue()
        message = connection.default_channel.basic_get("q")
        assert message.delivery_info["redelivered"]
        assert message.body == body
    message.ack()
    assert left(client) == {}


# A worker.

#: Celery cannot print what it refuses where the body has no length.
NO_LENGTH = ("no body", "body null", "body number")
BURIED_BY_US = [bad for bad, _ in (*BURIED.values(), *UNREADABLE.values())]
REFUSED_BY_CELERY = [bad for name, bad in DELIVERED.items() if name not in NO_LENGTH]
BAD_HEADERS = [
    {"eta": "not a time"},
    {"eta": "0001-01-01T00:00:00+14:00"},
    {"eta": "10000-01-01T00:00:00"},
    {"eta": "9" * 10_240},
    {"eta": [1]},
    {"eta": 7},
    {"x-delay": "abc"},
    {"x-delay": math.nan},
    {"x-delay": {}},
    {"expires": "not a time"},
]
#: What raises an exception in Celery's own code.
UNBEARABLE = {
    "no body": text(body=OMIT),
    "null body": text(body=None),
    "no id": text(headers={"task": "record"}),
    "task list": text(headers={"id": "x", "task": ["record"]}),
}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load_of(pid: int) -> float:
    """The share of one core that a process takes, over a second."""
    began, used = time.monotonic(), cpu_seconds(pid)
    wait_until(lambda: time.monotonic() - began > 1, "a second has passed")
    return (cpu_seconds(pid) - used) / (time.monotonic() - began)


@pytest.fixture
def settings(server: Server, tmp_path: Path) -> Settings:
    return Settings(f"delayed+{server.url}", None, {}, str(tmp_path / "ledger"))


@pytest.mark.smoke
def test_worker_survives(settings: Settings, client: redis.Redis, tmp_path: Path) -> None:
    ledger = Ledger(Path(settings.ledger))
    with Worker(settings, tmp_path) as worker, make_app(settings) as app:
        pid = worker.pid
        client.lpush("celery", *BURIED_BY_US, *REFUSED_BY_CELERY)
        for headers in BAD_HEADERS:
            app.send_task("record", headers=headers)
        app.send_task("record", task_id="good")
        app.send_task("record", task_id="later", countdown=0.5)
        ledger.wait_for_all(["good", "later"])
        wait_until(lambda: left(client, "celery").keys() <= {"dead"}, "all is dealt with")
        assert (worker.pid, worker.running) == (pid, True)
        assert worker.log.count(" ready.") == 1
        assert load_of(pid) < 0.5
    assert set(ledger.runs().values()) == {1}
    sent = len(BURIED_BY_US) + len(REFUSED_BY_CELERY) + len(BAD_HEADERS) + 2
    assert left(client, "celery")["dead"] + len(ledger.entries()) == sent
    assert "Can't decode message body" in worker.log


@pytest.mark.smoke
def test_a_worker_buries_what_would_end_it(
    settings: Settings, client: redis.Redis, tmp_path: Path
) -> None:
    client.lpush("celery", *UNBEARABLE.values())
    with Worker(settings, tmp_path) as worker, make_app(settings) as app:
        app.send_task("record", task_id="good")
        Ledger(Path(settings.ledger)).wait_for_all(["good"])
        wait_until(lambda: left(client, "celery") == {"dead": len(UNBEARABLE)}, "all are buried")
        assert worker.log.count(" ready.") == 1
        assert "Frequent restarts" not in worker.log
    reasons = {json.loads(each)["reason"] for each in client.hvals("{celery}:dead-reasons")}
    assert reasons == {
        "the message has no body",
        "the task 'record' has no header id",
        "the header task is no name but ['record']",
    }
