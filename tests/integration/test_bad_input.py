"""Each bad input gets a clear answer, and the message behind it is delivered."""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from kombu import Connection, Consumer, Exchange, Queue

from kombu_delayed.inspection.dead_letters import DeadLetters
from kombu_delayed.store.store import Limits, Store
from tests.kit.claims import deliver
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
    "invalid UTF-8": (b'{"body": "\xff"}', "not JSON"),
    "nothing": (b"", "not JSON"),
    "begins like a packed record": (b"\x01abcdef", "not JSON"),
    "begins like a compressed record": (b"12\x01zab", "not JSON"),
    "cut off": (text()[:-1], "not JSON"),
    "null": (b"null", "not a JSON object but NoneType"),
    "empty object": (b"{}", "no properties"),
    "deep lists": (b"[" * DEPTH + b"]" * DEPTH, "not JSON"),
    "deep header": (with_header('"x":' + "[" * DEPTH + "]" * DEPTH), "not JSON"),
    "10**5000": (with_tail(',"x":1' + "0" * 5000), "not JSON"),
    "properties null": (text(properties=None), "no properties"),
    "headers list": (text(headers=[]), "headers are not an object"),
    "delivery_info null": (text(properties=properties(delivery_info=None)), "delivery_info"),
    "much of an unknown type": (
        with_header('"x":{"__type__":"x","__value__":"' + "y" * 100_000 + '"}'),
        "not JSON",
    ),
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
    "content-encoding base99": text(content_encoding="base99"),
    "content-type unknown": text(content_type="application/x-nothing"),
    "1e400": with_tail(',"x":1e400'),
    "NaN": with_tail(',"x":NaN,"y":Infinity,"z":-Infinity'),
    "due_ms twice": with_tail(',"due_ms":1,"due_ms":2'),
    "due_ms text": with_tail(',"due_ms":"soon"'),
    "due_ms 1e400": with_tail(',"due_ms":1e400'),
    "deliveries text": with_tail(',"deliveries":"3"'),
    "deliveries float": with_tail(',"deliveries":1e400'),
    "deliveries twice": with_tail(',"deliveries":1,"deliveries":1'),
    "members twice": with_tail(',"headers":{},"properties":{}'),
    "eta long": text(headers={"eta": "9" * 10_240}),
    "eta year 10000": text(headers={"eta": "10000-01-01T00:00:00"}),
    "x-delay NaN": with_header('"x-delay":NaN'),
    "id surrogate": text(headers={"id": "\ud800"}),
    "id deep": with_header('"x":1,"id":' + "[" * 900 + "]" * 900),
    "id long": text(headers={"id": "{}\n" * 3_500}),
    "space in front": b" \n\t" + text(),
    "line feed behind": text() + b"\n",
}

#: Stock Kombu delivers these too, but they count as poison once they were not acked.
OVERDONE = {
    "deliveries 19": with_tail(',"deliveries":19'),
    "deliveries huge": with_tail(',"deliveries":' + "9" * 400),
}

UNREADABLE = {
    "base64": (text(properties=properties(body_encoding="base64")), "padding|base64"),
    "body_encoding unknown": (text(properties=properties(body_encoding="base99")), "decode"),
    "body_encoding list": (text(properties=properties(body_encoding=[1])), "lower"),
}


Way = Callable[[Connection, int], list[Any]]


def drain(connection: Connection, count: int, no_ack: bool = False) -> list[Any]:
    """Receive `count` messages, and any right behind them, through `drain_events`."""
    inbox = Inbox(connection, Queue("q"), no_ack=no_ack)
    wait_until(lambda: drained(connection, inbox) >= count, f"{count} are delivered")
    drained(connection, inbox)
    inbox.consumer.cancel()
    return inbox.messages


def drained(connection: Connection, inbox: Inbox) -> int:
    with contextlib.suppress(socket.timeout):
        while True:
            connection.drain_events(timeout=0.02)
    return len(inbox.messages)


def get(connection: Connection, _: int = 0, no_ack: bool = False) -> list[Any]:
    """Receive all messages through `basic_get`."""
    messages = []
    while found := connection.default_channel.basic_get("q", no_ack):
        messages.append(found)
        if not no_ack:
            found.ack()
    return messages


WAYS: dict[str, Way] = {
    "drain": drain,
    "drain no_ack": partial(drain, no_ack=True),
    "get": get,
    "get no_ack": partial(get, no_ack=True),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def push(client: redis.Redis, *texts: bytes) -> None:
    for each in texts:
        client.lpush("q", each)


def left(client: redis.Redis, queue: str = "q") -> dict[str, int]:
    """Count the messages by state; states without any are left out."""
    held = client.keys(f"{{{queue}}}:unacked:*")
    found = {
        "ready": client.llen(queue),
        "delayed": client.hlen(f"{{{queue}}}:messages"),
        "unacked": sum(client.hlen(key) for key in held),
        "dead": client.zcard(f"{{{queue}}}:dead"),
    }
    return {state: count for state, count in found.items() if count}


def check_buried(connection: Connection, cases: dict[str, tuple[bytes, str]]) -> None:
    letters = {letter.message: letter.reason for letter in DeadLetters(connection, "q")}
    assert letters.keys() == {bad for bad, _ in cases.values()}
    for name, (bad, reason) in cases.items():
        assert re.search(reason, letters[bad]), name
        assert len(letters[bad]) < 1000, name


def test_no_message_is_buried_and_an_odd_one_is_delivered_as_stock_would(
    way: Way, connection: Connection, client: redis.Redis
) -> None:
    odd = {**DELIVERED, **OVERDONE}
    push(client, *(bad for bad, _ in BURIED.values()), *odd.values(), GOOD)
    *found, good = way(connection, len(odd) + 1)
    for (name, case), message in zip(odd.items(), found, strict=True):
        expected = json.loads(case)
        body = expected.get("body")
        assert message.body == (body.encode() if isinstance(body, str) else body), name
        assert message.content_type == expected["content-type"], name
        headers = (expected.get("headers") or {}).items()
        assert message.headers.items() >= headers or "NaN" in name
    assert good.body == b'"good"'
    check_buried(connection, BURIED)
    assert left(client) == {"dead": len(BURIED)}


def test_unreadable_body_is_buried(connection: Connection, client: redis.Redis) -> None:
    """A caller that fetches such a message itself gets the reason."""
    bad = [text for text, _ in UNREADABLE.values()]
    push(client, *bad, GOOD)
    assert [message.body for message in drain(connection, 1)] == [b'"good"']
    push(client, *bad, GOOD)
    for _, reason in UNREADABLE.values():
        with pytest.raises((ValueError, AttributeError), match=f"(?i){reason}"):
            get(connection)
    assert [message.body for message in get(connection)] == [b'"good"']
    check_buried(connection, UNREADABLE)
    assert not connection.default_channel.qos.held


def test_a_reason_with_half_of_a_surrogate_pair(
    connection: Connection, client: redis.Redis
) -> None:
    """It may quote a text with a cut emoji."""
    push(client, GOOD)
    Queue("q")(connection.default_channel).declare()
    message = connection.default_channel.basic_get("q")
    message.channel.qos.because(message.delivery_tag, "it says \ud83d")
    message.reject()
    connection.default_channel.flush()
    (letter,) = DeadLetters(connection, "q")
    assert letter.reason == r"it says \ud83d"


def test_what_was_taken_without_an_ack_leaves_nothing_in_memory(
    connection: Connection, client: redis.Redis
) -> None:
    news = Queue("reader", Exchange("news", type="fanout"))
    bad: list[Any] = []
    channel = connection.default_channel
    with Consumer(
        channel,
        [Queue("q"), news],
        no_ack=True,
        accept=["json"],
        callbacks=[Mock()],
        on_decode_error=lambda message, error: bad.append(message),
    ):
        wait_until(lambda: drain_for(connection, 0.1) or client.pubsub_numpat(), "it listens")
        producer = connection.Producer(serializer="pickle")
        producer.publish("x", routing_key="q")
        producer.publish("x", exchange=news.exchange, declare=[news.exchange])
        wait_until(lambda: drain_for(connection, 0.1) or len(bad) == 2, "both have come")
    assert not channel.qos._unreadable


def drain_for(connection: Connection, seconds: float) -> None:
    with contextlib.suppress(socket.timeout):
        connection.drain_events(timeout=seconds)


def test_odd_message_is_rejected(connection: Connection, client: redis.Redis) -> None:
    odd = [*DELIVERED.values(), *OVERDONE.values()]
    push(client, *odd, GOOD)
    inbox = Inbox(connection, Queue("q"), ack=False)
    wait_until(lambda: drained(connection, inbox) == len(odd) + 1, "all are delivered")
    *rejected, good = inbox.messages
    for message in rejected:
        message.reject()
    good.ack()
    inbox.consumer.cancel()
    letters = [*DeadLetters(connection, "q")]
    assert {letter.reason for letter in letters} == {"rejected"}
    assert sorted(letter.message for letter in letters) == sorted(odd)
    assert left(client) == {"dead": len(odd)}


def test_what_kills_its_consumers_is_counted_and_buried(store: Store, client: redis.Redis) -> None:
    store.limits = Limits(max_deliveries=3)
    push(client, *DELIVERED.values(), *OVERDONE.values(), *(bad for bad, _ in UNREADABLE.values()))
    count, sizes = len(DELIVERED) + len(OVERDONE) + len(UNREADABLE), []
    for _ in range(3):
        store.now = "1000"
        sizes.append(len(deliver(store, want=100, lease_ms=100).records))
        store.now = "1100"
        assert store.leases.reclaim("q", "A") == sizes[-1]
    # Two come with a count of their own that is over the limit, and one with a count of 1.
    assert sizes == [count, count - 2, count - 3]
    assert left(client) == {"dead": count}


def publish(connection: Connection, name: str, **headers: Any) -> None:
    queue = Queue(name, Exchange("x"), routing_key="k")
    producer = connection.Producer(exchange=queue.exchange, routing_key="k")
    producer.publish("news", headers=headers, declare=[queue])


QUEUES = ["a{b}c", "{q}", "}{", "a b", " ", "a\nb", "a\0b", "a:b", "*[%d]?", "ü\u4e2d😀"]
QUEUES += ["x" * 10_240]


@pytest.mark.parametrize("name", QUEUES, ids=lambda name: repr(name)[:20])
def test_queue_names(name: str, connection: Connection, client: redis.Redis) -> None:
    publish(connection, name)
    publish(connection, name, **{"x-delay": 60_000})
    assert left(client, name) == {"ready": 1, "delayed": 1}
    channel = connection.default_channel
    for _ in range(2):
        message = channel.basic_get(name)
        assert message.payload == "news"
        message.ack()
        assert channel.basic_get(name) is None
        channel.store.now = END_OF_TIME
    connection.release()
    known = [key for key in all_keys(client) if not key.startswith("_kombu.binding")]
    assert [key for key in known if not key.endswith(":wake")] == []


@pytest.mark.parametrize("name", ["\ud800", "a\x06\x163"], ids=["surrogate", "separator"])
def test_queue_name_is_refused(name: str, connection: Connection, client: redis.Redis) -> None:
    for headers in ({}, {"x-delay": 60_000}):
        with pytest.raises(ValueError, match=r"surrogates|separates name and priority"):
            publish(connection, name, **headers)
    assert [key for key in all_keys(client) if not key.startswith("_kombu.binding")] == []


@pytest.mark.parametrize(
    "name",
    [
        "{mail}:paused",
        "{mail}:gate:x",
        "{mail}:unacked:x",
        "kombu-delayed-shards",
        "_kombu.binding.a",
    ],
)
def test_the_name_of_another_key_is_refused(
    name: str, connection: Connection, client: redis.Redis
) -> None:
    """Its list would stand where scripts expect something else: the workers of `mail` would end."""
    for headers in ({}, {"x-delay": 60_000}):
        with pytest.raises(ValueError, match="keeps something else under this name"):
            publish(connection, name, **headers)
    assert not client.exists(name)
    publish(connection, "{mail}:other")


# A worker.

#: Celery cannot print a message that it refuses if the body has no length.
NO_LENGTH = ("no body", "body null", "body number")
BURIED_BY_US = [bad for bad, _ in (*BURIED.values(), *UNREADABLE.values())]
REFUSED_BY_CELERY = [bad for name, bad in DELIVERED.items() if name not in NO_LENGTH]
BAD_HEADERS: list[dict[str, Any]] = [
    *({"eta": each} for each in ("not a time", "0001-01-01T00:00:00+14:00", "9" * 10_240, [1], 7)),
    *({"x-delay": each} for each in ("abc", math.nan, {})),
    {"expires": "not a time"},
]
#: The members of a task's body.
TASK = [["bad"], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]


def task_text(body: Any = TASK, headers: Any = None) -> bytes:
    """A task as Celery writes it, with another body or other headers."""
    given = {"id": "bad", "task": "record", **(headers or {})}
    return text(headers=given, body=json.dumps(body))


#: Messages that raise an exception in Celery's own code.
UNBEARABLE = {
    "no body": text(body=OMIT),
    "null body": text(body=None),
    "body number": text(body=7),
    "no id": text(headers={"task": "record"}),
    "task list": text(headers={"id": "x", "task": ["record"]}),
    "id list": text(headers={"id": ["x"], "task": "record"}),
    **{
        f"time limit {limit}": task_text(headers={"timelimit": limit})
        for limit in ("x", [1], [["x"], None], ["x", None], {"x": 1}, [None, math.nan])
    },
    "stamps number": task_text(headers={"stamped_headers": 7}),
    "stamps nested": task_text(headers={"stamped_headers": [["x"]]}),
    **{
        f"{name} {value!r}": task_text(headers={name: value})
        for name in ("eta", "expires")
        for value in ("", 0, False, [])
    },
    "shadow list": task_text(headers={"shadow": ["x"]}),
    "content-encoding": text(
        headers={"id": "bad", "task": "record"}, body=json.dumps(TASK), content_encoding=True
    ),
    "body_encoding": text(
        headers={"id": "bad", "task": "record"}, properties=properties(body_encoding="\ud83d")
    ),
    "protocol 1 with a unique key": text(
        headers={"delayed_unique": "k", "delayed_until": "finished"},
        body=json.dumps({"task": "record", "id": "bad 1", "args": [], "kwargs": {}}),
    ),
    "unique key": task_text(
        headers={"id": "bad 2", "delayed_unique": "\ud83d", "delayed_until": "finished"}
    ),
    **{
        f"body {body}": task_text(body)
        for body in ([], {}, None, 7, [1], [1, 2, 3, 4], "args", {"a": 1, "b": 2, "c": 3})
    },
    "protocol 1 in the body of a task": task_text({"args": [1], "kwargs": {}, "timelimit": [1]}),
    **{
        f"protocol 1 {fields}": text(headers={}, body=json.dumps({"task": "record", **fields}))
        for fields in ({"task": ["x"], "id": "x"}, {"id": ["x"]}, {"id": "x", "timelimit": [1]}, {})
    },
    "content-type null": text(
        headers={"id": "bad", "task": "record"}, body=json.dumps(TASK), content_type=None
    ),
}


@pytest.fixture
def settings(server: Server, tmp_path: Path) -> Settings:
    return Settings(f"delayed+{server.url}", None, {}, str(tmp_path / "ledger"))


@pytest.mark.smoke
def test_worker_survives(settings: Settings, client: redis.Redis, tmp_path: Path) -> None:
    ledger = Ledger(Path(settings.ledger))
    bad = [*BURIED_BY_US, *REFUSED_BY_CELERY, *UNBEARABLE.values()]
    with Worker(settings, tmp_path) as worker, make_app(settings) as app:
        pid = worker.pid
        client.lpush("celery", *bad)
        for headers in BAD_HEADERS:
            app.send_task("record", headers=headers)
        app.send_task("nowhere")
        app.send_task("record", task_id="good")
        app.send_task("record", task_id="later", countdown=0.5)
        app.send_task("record", task_id="endless", time_limit=math.inf)
        ledger.wait_for_all(["good", "later", "endless"])
        wait_until(lambda: left(client, "celery").keys() <= {"dead"}, "all is dealt with")
        assert (worker.pid, worker.running) == (pid, True)
        assert worker.log.count(" ready.") == 1
        assert "Frequent restarts" not in worker.log
    assert set(ledger.runs().values()) == {1}
    sent = len(bad) + len(BAD_HEADERS) + 4
    assert left(client, "celery")["dead"] + len(ledger.entries()) == sent
    reasons = {json.loads(each)["reason"] for each in client.hvals("{celery}:dead-reasons")}
    assert reasons > {
        "the message has no body",
        "the message has the body 7",
        "the task 'record' has no header id",
        "the task 'record' has the header id ['x']",
        "the header task is not a name but ['record']",
        "the worker has no task 'nowhere': did its app import the module?",
    }
    assert "rejected" not in reasons
