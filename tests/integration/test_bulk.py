"""schedule_many sends what Celery would send, and says what became of each row."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, chain, chord, group, signals
from celery._state import _task_stack
from celery.canvas import Signature
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu import Exchange, Queue

from celery_ext import Delayed
from celery_ext.control.bulk import schedule as bulk_module
from celery_ext.control.bulk.schedule import BulkReport, Refused
from celery_ext.control.unique import unique_headers
from celery_ext.errors import BulkError
from kombu_delayed.errors import ServerFull
from tests.kit.backlog import check_backlog
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.state import state

pytestmark = pytest.mark.filterwarnings("ignore:the broker had lost the binding")

ETA = datetime(2100, 1, 2, 3, 4, 5, 678901, timezone.utc)
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
TAG = re.compile(r'"delivery_tag": "[^"]*"')
EXPIRES = re.compile(r'"expires": "[^"]*"|"expiration": "[^"]*"')
HEADER_ETA = re.compile(r'"eta": "[^"]*"')


def ignore(*args: Any, **kwargs: Any) -> None:
    pass


def make_app(url: str, **config: Any) -> Celery:
    app = Celery("bulk", broker=f"delayed+{url}", set_as_current=False)
    app.conf.update(
        task_routes={"routed": {"queue": "far", "priority": 6}},
        task_queues=[
            Queue("celery"),
            Queue("far"),
            Queue("topical", Exchange("topics", type="topic"), routing_key="a.#"),
        ],
        **config,
    )

    @app.task(name="add", shared=False)
    def add(x: Any, y: Any = 0) -> Any:
        return x

    for name, options in {
        "routed": {"ignore_result": True},
        "urgent": {"time_limit": 9},
        "brief": {"expires": 60},
        "shadowed": {"shadow_name": lambda *a: str(a[1])},
    }.items():
        app.task(name=name, shared=False, typing=False, **options)(ignore)
    return app


@contextmanager
def opened(url: str, **config: Any) -> Iterator[Delayed]:
    with make_app(url, **config) as app, closing(Delayed(app)) as delayed:
        yield delayed


@pytest.fixture
def delayed(server: Server) -> Iterator[Delayed]:
    with opened(server.url) as delayed:
        yield delayed


@pytest.fixture
def app(delayed: Delayed) -> Celery:
    return delayed.app


def send(delayed: Delayed, rows: Any, **options: Any) -> BulkReport:
    return delayed.schedule_many(rows, **{"progress": None, **options})


def one_by_one(app: Celery, rows: list[Any]) -> None:
    for row in rows:
        if isinstance(row, Signature):
            row.apply_async()
            continue
        task, args, kwargs, eta, options = row
        options = dict(options or {}, **({"eta": eta} if eta is not None else {}))
        if isinstance(task, str):
            app.send_task(task, args, kwargs, **options)
        else:
            task.apply_async(args, kwargs, **options)


def messages(client: redis.Redis, times: bool = True) -> dict[str, Any]:
    """The texts of all messages, without the parts that differ each time, and their places."""
    found = {}
    for key, value in state(client).items():
        if key.endswith("}:messages"):
            found[key] = {id: _text(text, times) for id, text in value.items()}  # type: ignore
        elif isinstance(value, list) and not key.startswith("_kombu"):
            found[key] = [_text(text, times) for text in value]
        elif times and ":delayed:" in key:
            found[key.partition(":delayed:")[0]] = value
    return found


def _text(text: str, times: bool) -> str:
    text = EXPIRES.sub("", TAG.sub("", text))
    return text if times else HEADER_ETA.sub('"eta"', text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
others = st.sampled_from(
    [ETA, ETA.date(), timedelta(1), b"\xff", {1, 2}, {1: 2}, "x" * 1500, "'%s' \\ \" é \ud800"]
)
arguments = st.one_of(
    st.none(),
    st.lists(json_values, max_size=2),
    st.lists(json_values | others, max_size=2).map(tuple),
)
keywords = st.none() | st.dictionaries(st.text(max_size=5), json_values, max_size=2)
etas = st.one_of(
    st.none(),
    st.datetimes(datetime(2020, 1, 1), datetime(2200, 1, 1)),
    st.datetimes(datetime(2090, 1, 1), datetime(2200, 1, 1)).map(datetime.isoformat),
    st.sampled_from([ETA, ETA.astimezone(timezone(timedelta(hours=-3.5))), "2100-01-01T00:00Z"]),
)
#: Only a few, so that rows of one kind meet.
option_sets = st.sampled_from(
    [
        None,
        {},
        {"priority": 9},
        {"priority": 5.0, "queue": "far"},
        {"priority": True},
        {"queue": "new %s queue"},
        {"queue": "topical", "routing_key": "a.b"},
        {"exchange": "topics", "routing_key": "a"},
        {"serializer": "pickle"},
        {"serializer": "yaml"},
        {"compression": "zlib"},
        {"ignore_result": True, "shadow": 'it\'s "me"', "time_limit": 5, "soft_time_limit": 2.5},
        {"headers": {"tenant": "t1", "n": [1, {"a": None}]}},
        {"headers": {"tenant": "%(id)s <gap:id>"}, "priority": 9},
        {"headers": {"task": "other", "tenant": 1}},
        {"root_id": "r", "parent_id": "p"},
        {"root_id": "r2", "group_id": "g", "group_index": 3},
        {"reply_to": "me", "retries": 2},
        {"stamped_headers": ["stamp"], "stamp": "s"},
        {"argsrepr": "(hidden)"},
        {"expires": ETA.isoformat()},
        {"link": Signature("done", args=(1,))},
        {"delivery_mode": 1, "correlation_id": "c"},
        {"origin": "elsewhere"},
    ]
)
NAMES = ("add", "routed", "urgent", "brief", "shadowed", "unknown.task")


@st.composite
def bulk_rows(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Rows as tuples, whose first part is a name and the form that it is to have."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2))
    forms = st.tuples(st.sampled_from(names), st.sampled_from(["name", "task", "signature"]))
    row = st.tuples(forms, arguments, keywords, etas, option_sets)
    rows = draw(st.lists(row, min_size=1, max_size=8))
    return [(*each[:4], {**(each[4] or {}), "task_id": f"id {n}"}) for n, each in enumerate(rows)]


def as_row(app: Celery, row: tuple[Any, ...]) -> Any:
    (name, form), args, kwargs, eta, options = row
    task = app.tasks.get(name)
    if form == "name" or task is None:
        return name, args, kwargs, eta, options
    if form == "task":
        return task, args, kwargs, eta, options
    return task.signature(args, kwargs, **options, **({"eta": eta} if eta is not None else {}))


@pytest.fixture(scope="module")
def shared(shared_server: Server) -> Iterator[Delayed]:
    with opened(shared_server.url, result_backend="cache+memory://") as delayed:
        yield delayed


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(drawn=bulk_rows())
def test_the_same_messages_as_celery(
    drawn: list[tuple[Any, ...]], shared: Delayed, shared_server: Server
) -> None:
    app = shared.app
    with shared_server.client() as client:
        refused = []
        client.flushall()
        for n, each in enumerate(drawn):
            try:
                one_by_one(app, [as_row(app, each)])
            except Exception:  # what Celery refuses
                refused.append(n)
        sent = messages(client)
        client.flushall()
        report = send(shared, (as_row(app, each) for each in drawn))
        assert messages(client) == sent
        assert [each.row for each in report.refusals] == refused
        assert report.rows == len(drawn)


@pytest.mark.parametrize("config", [{}, {"enable_utc": False, "timezone": "Asia/Kathmandu"}])
def test_countdowns(config: Any, server: Server, client: redis.Redis) -> None:
    with opened(server.url, **config) as delayed:
        rows = [
            as_row(
                delayed.app,
                (("add", form), (n,), {}, None, {"countdown": 60.5 + n, "task_id": f"{n}"}),
            )
            for n, form in enumerate(["name", "task", "signature"] * 2)
        ]
        one_by_one(delayed.app, rows)
        sent, due = messages(client, times=False), check_backlog(client, "celery")
        offset = {_eta_of(text).utcoffset() for text in client.hvals("{celery}:messages")}
        client.flushall()
        assert send(delayed, rows).delayed == 6
        assert messages(client, times=False) == sent
        for id, due_ms in check_backlog(client, "celery").items():
            assert abs(due_ms - due[id]) < 60_000
        again = {_eta_of(text).utcoffset() for text in client.hvals("{celery}:messages")}
        assert again == offset


def _eta_of(record: bytes) -> datetime:
    return datetime.fromisoformat(json.loads(record[record.index(b"{") :])["headers"]["eta"])


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_batches(batch: int, delayed: Delayed, client: redis.Redis) -> None:
    told: list[int] = []
    report = send(delayed, (("add", (n,)) for n in range(0)), batch=batch)
    assert report == BulkReport()
    report = send(
        delayed, (("add", (n,), {}, ETA) for n in range(30)), batch=batch, progress=told.append
    )
    assert report == BulkReport(rows=30, delayed=30)
    assert sum(told) == 30
    assert len(check_backlog(client, "celery")) == 30
    tags = {TAG.search(text.decode()).group() for text in client.hvals("{celery}:messages")}  # type: ignore
    assert len(tags) == 30
    with pytest.raises(ValueError, match="at least 1 row, not 0"):
        send(delayed, [], batch=0)


def test_a_bar_on_the_terminal(delayed: Delayed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", shown := io.StringIO())
    monkeypatch.setattr(shown, "isatty", lambda: True)
    delayed.schedule_many([("add", (1,), {}, ETA)] * 4, batch=2)
    assert "scheduling" in shown.getvalue()
    assert "4/4" in shown.getvalue()
    delayed.schedule_many(iter([]), batch=2)


def send_and_die(url: str, count: int) -> None:
    def rows() -> Iterator[Any]:
        for n in range(count):
            yield "add", (n,), {}, ETA, {"task_id": f"{n}"}
        os.kill(os.getpid(), signal.SIGKILL)

    send(Delayed(make_app(url)), rows(), batch=10)


def test_a_process_that_is_killed(server: Server, delayed: Delayed, client: redis.Redis) -> None:
    """Another process completes it: despite its other origin it counts as the same sender."""
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=send_and_die, args=(server.url, 95))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    stored = len(check_backlog(client, "celery"))
    assert 80 <= stored <= 90
    rows = [("add", (n,), {}, ETA, {"task_id": f"{n}"}) for n in range(120)]
    report = send(delayed, rows)
    assert (report.already, report.delayed) == (stored, 120 - stored)
    assert set(check_backlog(client, "celery")) == {str(n) for n in range(120)}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (5, "a row is a signature or (task, args, kwargs, eta, options), not int: 5"),
        ((5,), "a task is a task of the app or a name, not 5"),
        (("add", (1,), {}, "soon"), "eta takes a datetime or ISO 8601, not 'soon'"),
        (("add", (1,), {}, ETA, 5), "options are a mapping, not int: 5"),
        (("add", (1,), {}, None, {"countdown": float("nan")}), "countdown=nan is not a time from"),
        (("add", (1,), {}, None, {"countdown": 1e15}), "countdown=1000000000000000.0 is not a "),
        (("add", (1,), {}, None, {"countdown": 10**400}), "countdown=1000000000000000000000000000"),
        (("add", (1,), {}, None, {"countdown": "5"}), "countdown takes a number of seconds, not"),
        (("add", "text", {}, ETA), "TypeError: task args must be a list or tuple"),
        (("add", (object,), {}, ETA), "EncodeError: "),
        (("add", (ENDLESS,), {}, ETA), "EncodeError: Circular reference detected"),
        (Signature("add", app=Celery("other", set_as_current=False)), "belongs to another app"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_refused(row: Any, reason: str, warm: bool, delayed: Delayed, client: redis.Redis) -> None:
    good = ("add", (1,), {}, ETA)
    rows = [good, row, good] if warm else [row, good, good]
    report = send(delayed, rows)
    assert (report.rows, report.delayed, report.refused) == (3, 2, 1)
    assert len(check_backlog(client, "celery")) == 2
    [refused] = report.refusals
    assert refused.row == (1 if warm else 0)
    assert reason in refused.reason


def test_unique_tasks(delayed: Delayed) -> None:
    headers = {"delayed_unique": "key"}
    rows = [("add", (n,), {}, ETA, {"headers": headers if n % 2 else {"n": 1}}) for n in range(5)]
    report = send(delayed, rows)
    assert (report.rows, report.delayed, report.refused) == (5, 4, 1)
    assert report.refusals[0].row == 3
    assert report.refusals[0].reason.startswith("AlreadyDelayed: task ")
    assert sum("delayed_unique" in each.headers for each in delayed.find()) == 1
    again = [("add", (1,), {}, ETA, {"task_id": "a", "headers": unique_headers("other")})]
    assert send(delayed, again).delayed == 1
    assert send(delayed, again) == BulkReport(rows=1, already=1)


@pytest.mark.parametrize(
    ("conflict", "eta", "expected"),
    [
        ("replace", ETA, {"delayed": 3}),
        ("replace", datetime(2020, 1, 1), {"ready": 3}),
        ("debounce", ETA, {"delayed": 1, "already": 2}),
        ("debounce", datetime(2020, 1, 1), {"ready": 3}),
    ],
)
def test_unique_tasks_that_take_each_other_s_place(
    conflict: str, eta: datetime, expected: dict[str, int], delayed: Delayed
) -> None:
    headers = unique_headers("key", conflict)
    rows = [("add", (n,), {}, eta, {"task_id": f"{n}", "headers": headers}) for n in range(3)]
    assert send(delayed, rows) == BulkReport(rows=3, **expected)


def test_refused_by_the_router(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_module, "REFUSED_SIZE", 3)
    with opened(server.url, task_create_missing_queues=False) as delayed:
        queues = ["far", "no", "far", "no", "no", "no"]
        report = send(delayed, [("add", (1,), {}, ETA, {"queue": each}) for each in queues])
        assert (report.delayed, report.refused, len(report.refusals)) == (2, 4, 3)
        assert report.refusals[0] == Refused(
            1, "QueueNotFound: \"Queue 'no' missing from task_queues\""
        )


@pytest.mark.parametrize(
    ("make", "sent"),
    [
        (lambda add: chain(add.s(1), add.s(2), add.s(3)), ["add"]),
        (lambda add: group(add.s(n) for n in range(3)), ["add"] * 3),
        (lambda add: chord([add.s(1), add.s(2)], add.s(3)), ["add"] * 2),
        (lambda add: group(chain(add.s(1), add.s(2)), add.s(3)), ["add"] * 2),
    ],
)
def test_canvases(
    make: Callable[[Any], Signature], sent: list[str], server: Server, client: redis.Redis
) -> None:
    with opened(server.url, result_backend="cache+memory://") as delayed:
        canvas = make(delayed.app.tasks["add"])
        report = send(delayed, [("add", (0,), {}, ETA), canvas, canvas.set(countdown=50)])
        assert (report.rows, report.refused) == (3, 0)
        tasks = [each.task for each in delayed.find(queue="celery")]
        tasks += [json.loads(text)["headers"]["task"] for text in client.lrange("celery", 0, -1)]
        assert sorted(tasks) == sorted(["add", *sent, *sent])
        assert report.accepted == len(tasks)


def test_signals(delayed: Delayed) -> None:
    """`before_task_publish` may change headers, `after_task_publish` comes when it is stored."""
    stored = []

    def mark(headers: dict[str, Any], **_: Any) -> None:
        headers["marked"] = headers["id"]

    def look(headers: dict[str, Any], **_: Any) -> None:
        stored.append(delayed.get(headers["id"]) is not None)

    signals.before_task_publish.connect(mark)
    signals.after_task_publish.connect(look)
    send(delayed, [("add", (n,), {}, ETA) for n in range(5)])
    assert [each.headers["marked"] == each.id for each in delayed.find()] == [True] * 5
    assert stored == [True] * 5


def test_sent_events(server: Server, client: redis.Redis) -> None:
    with opened(server.url, task_send_sent_event=True) as delayed, client.pubsub() as listener:
        listener.psubscribe("*celeryev*")
        listener.get_message(timeout=5)
        send(delayed, [("add", (n,), {}, ETA) for n in range(3)])
        heard = [listener.get_message(timeout=5)["data"].decode() for _ in range(3)]
        assert all("task.sent" in text for text in heard)
        assert len(check_backlog(client, "celery")) == 3


def test_in_a_task(app: Celery, delayed: Delayed, client: redis.Redis) -> None:
    """Tasks sent by a task descend from it but are not listed as children: there are too many."""
    task = app.tasks["urgent"]
    me = {"id": "me", "root_id": "first", "called_directly": False, "delivery_info": {}}
    task.push_request(**me, children=[])
    _task_stack.push(task)
    try:
        rows = [("add", (n,), {}, ETA, {"task_id": f"{n}"}) for n in range(5)]
        one_by_one(app, rows)
        sent = messages(client)
        client.flushall()
        task.request.children.clear()
        send(delayed, rows)
        assert task.request.children == []
    finally:
        _task_stack.pop()
        task.pop_request()
    assert messages(client) == sent
    assert {each.headers["root_id"] for each in delayed.find()} == {"first"}
    assert {each.headers["parent_id"] for each in delayed.find()} == {"me"}


@pytest.mark.parametrize("kind", available_kinds())
def test_a_broker_that_ends(kind: str, tmp_path: Path) -> None:
    with start_server(kind, tmp_path, port=0) as server, opened(server.url) as delayed:
        with pytest.raises(BulkError, match=r"the first [0-9]+ rows were processed") as caught:
            send(delayed, rows_that_do(server.kill), batch=50)
        assert 400 <= caught.value.report.rows <= 500


def test_a_broker_that_is_full(delayed: Delayed, client: redis.Redis) -> None:
    fill = partial(client.config_set, "maxmemory", "1mb")
    try:
        with pytest.raises(BulkError, match=r"the first [0-9]+ rows were processed") as caught:
            send(delayed, rows_that_do(fill), batch=50)
    finally:
        client.config_set("maxmemory", "0")
    done = caught.value.report.rows
    assert 400 <= done <= 500
    assert isinstance(caught.value.__cause__, redis.ResponseError)
    assert str(ServerFull.__doc__).splitlines()[0] in str(caught.value)
    again = send(delayed, rows_that_do(lambda: None))
    assert again.already >= done
    assert again.already + again.delayed == 1000


def rows_that_do(action: Callable[[], Any]) -> Iterator[Any]:
    """Yield a thousand rows, and run `action` half way."""
    for n in range(1000):
        if n == 500:
            action()
        yield "add", (n,), {}, ETA, {"task_id": f"{n}"}
