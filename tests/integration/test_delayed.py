"""`Delayed` reports on an app's delayed tasks and changes them, with no worker alive."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis
from celery import Celery
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from celery_ext import BrokerError, Delayed, Query, TaskInfo, install
from celery_ext.app.signals import task_cancelled, task_rescheduled
from celery_ext.errors import QueryError
from kombu_delayed.inspection import backlog as backlog_module
from kombu_delayed.inspection import lookup
from kombu_delayed.inspection.lookup import held_ids, lookup_by_reading
from kombu_delayed.store.store import Store
from tests.kit.backlog import check_backlog
from tests.kit.proxy import Proxy
from tests.kit.servers import Server
from tests.kit.state import entry, message
from tests.kit.tasks_app import Settings, make_app

HOUR = timedelta(hours=1)
SEEN_LATE = timedelta(seconds=30)


def now() -> datetime:
    return datetime.now(timezone.utc)


def in_hours(hours: float) -> datetime:
    return now() + HOUR * hours


@pytest.fixture
def make(server: Server) -> Iterator[Callable[..., Any]]:
    """Make extended apps on the server; keyword arguments are transport options."""
    with contextlib.ExitStack() as stack:

        def make(url: str = f"delayed+{server.url}", config: Any = None, **options: Any) -> Any:
            settings = Settings(url, None, options, config=config or {})
            app = stack.enter_context(make_app(settings))
            stack.callback(install(app).close)
            return app

        yield make


@pytest.fixture
def app(make: Callable[..., Celery]) -> Celery:
    return make()


@pytest.fixture
def delayed(app: Celery) -> Delayed:
    found: Delayed = app.delayed
    return found


def send(app: Celery, id: str, hours: float = 1, name: str = "record", **options: Any) -> str:
    """Send a task that is due in so many hours; returns its id."""
    eta = in_hours(hours)
    return app.send_task(name, task_id=id, eta=eta, **{"args": (id,), **options}).id


def ids(infos: Any) -> list[str]:
    return [info.id for info in infos]


def get(delayed: Delayed, id: str) -> TaskInfo:
    """Return a task that is there."""
    found = delayed.get(id)
    assert found
    return found


def test_get_a_delayed_task(app: Celery, delayed: Delayed) -> None:
    eta, headers = in_hours(2), {"tenant": "t"}
    app.send_task("record", ("é", 1), {"k": 2}, task_id="a", eta=eta, priority=5, headers=headers)
    found = get(delayed, "a")
    assert (found.id, found.state, found.queue, found.task) == ("a", "delayed", "celery", "record")
    assert (found.args, found.kwargs, found.priority) == ("('é', 1)", "{'k': 2}", 5)
    assert (found.deliveries, found.consumer, found.reason, found.tenant) == (0, "", "", "t")
    assert found.eta
    assert timedelta(0) <= found.eta - eta < timedelta(milliseconds=1)
    assert found.remaining
    assert abs(found.remaining - 2 * HOUR) < SEEN_LATE
    assert datetime.fromisoformat(json.loads(json.dumps(found.as_dict()))["eta"]) == found.eta


def test_get_tells_where_a_task_is(app: Celery, delayed: Delayed) -> None:
    """The ETA of a task is still known after its wait."""
    send(app, "dead", -1, priority=3)
    bury(delayed.store, "dead", "because")
    dead = get(delayed, "dead")
    assert (dead.state, dead.reason, dead.consumer) == ("dead", "because", "C")
    assert (dead.task, dead.priority, dead.deliveries) == ("record", 3, 1)
    app.send_task("record", task_id="now", priority=6)
    for id, hours in (("unacked", 0.4), ("ready", 0.5)):
        send(app, id, hours)
    delayed.store.now = "+3600000"
    assert delayed.counts()["celery"].due == 2
    assert get(delayed, "ready").state == "delayed"
    delayed.store.deliver("celery", "C", 1, 1, lease_ms=60_000)
    unacked, ready, now = (get(delayed, id) for id in ("unacked", "ready", "now"))
    assert (unacked.state, unacked.consumer, ready.state) == ("unacked", "C", "ready")
    assert (now.eta, now.remaining, now.priority) == (None, None, 6)
    for found in (unacked, ready):
        assert found.eta
        assert abs(found.eta - in_hours(0.45)) < HOUR / 10
    assert delayed.get("x") is delayed.get("x", queue="celery") is None


def bury(store: Store, *names: str, queue: str = "celery") -> None:
    """Bury ready tasks; a name may be a task id followed by a reason."""
    id, *reason = names
    answer = store.deliver(queue, "C", 1, 1, lease_ms=60_000)
    assert answer
    assert json.loads(answer.records[0][1:])["headers"]["id"] == id
    assert store.bury(queue, "C", [(1, id, *(reason or ["rejected"]), b"")]) == 1


def test_an_id_that_looks_like_another(app: Celery, delayed: Delayed) -> None:
    """The id is compared, not searched for in the text."""
    app.send_task("record", ("b",), task_id="a")
    assert delayed.get("b") is None
    assert delayed.get('"') is None


@pytest.mark.parametrize("id", ["ä/ß?*[", 'a"b', "a\\b", "\U0001f407", "a b"])
def test_ids_of_any_characters(id: str, app: Celery, delayed: Delayed) -> None:
    app.send_task("record", task_id=id)
    assert get(delayed, id).state == "ready"
    app.control.purge()
    send(app, id)
    assert get(delayed, id).state == "delayed"
    assert delayed.reschedule(id, countdown=7200)
    assert ids(delayed.find()) == [id]
    assert delayed.cancel(id)
    assert not delayed.cancel(id)


@pytest.fixture
def after_page(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[int], Any]], None]:
    """Call a function after each page of a ready list, with the number of its messages."""

    def call(function: Callable[[int], Any]) -> None:
        own = store.ask

        def ask(name: str, *arguments: Any, **given: Any) -> Any:
            answer = own(name, *arguments, **given)
            if name == "ready_page":
                function(answer[0])
            return answer

        monkeypatch.setattr(store, "ask", ask)

    return call


def test_a_reader_of_ready_lists_passes_over_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, after_page: Any
) -> None:
    """This is so even while others publish and take messages."""
    monkeypatch.setattr(lookup, "PAGE_SIZE", 4)
    texts = [f'{{"body": "", "headers": {{"id": "{n}"}}, "properties": {{}}}}' for n in range(20)]

    def others(count: int) -> None:
        store.client.lpush("q", *["{}"] * 3)
        store.client.rpop("q")

    after_page(others)
    for wanted in range(10, 20):
        store.client.delete("q")
        store.client.lpush("q", *texts)
        assert next(lookup_by_reading(store, "q", str(wanted))).state == "ready"


def test_large_ready_messages_are_read_a_few_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch, after_page: Any
) -> None:
    """A server would have to hold all texts of a page in one answer."""
    monkeypatch.setattr(lookup, "PAGE_BYTES", 10_000)
    for n in range(300):
        store.client.lpush("q", message("x" * (1000 if n < 200 else 1), headers={"id": f"{n}"}))
    sizes: list[int] = []
    after_page(sizes.append)
    assert {*held_ids(store, "q")} == {f"{n}" for n in range(300)}
    assert max(sizes) == 150  # the short ones, and the first large ones


@pytest.fixture
def told() -> Iterator[list[tuple[str, Any]]]:
    """The signals sent: ("cancelled", id) for a cancelled task, (id, ETA) for a rescheduled one."""
    said: list[tuple[str, Any]] = []

    def cancelled(info: TaskInfo, **_: Any) -> None:
        said.append(("cancelled", info.id))

    def rescheduled(task_id: str, eta: str | None, **_: Any) -> None:
        said.append((task_id, eta))

    task_cancelled.connect(cancelled)
    task_rescheduled.connect(rescheduled)
    yield said
    task_cancelled.disconnect(cancelled)
    task_rescheduled.disconnect(rescheduled)


def test_cancel(app: Celery, delayed: Delayed, told: list[Any]) -> None:
    send(app, "a")
    send(app, "b")
    assert delayed.cancel("a") is True
    assert delayed.cancel("a") is False
    assert delayed.cancel("x") is False
    assert ids(delayed.find()) == ["b"]
    assert told == [("cancelled", "a")]


AT = datetime(2100, 1, 2, 3, 4, 5, 678_900, tzinfo=timezone.utc)


@pytest.mark.parametrize("eta", [AT, AT.replace(tzinfo=None), "2100-01-02T05:04:05.6789+02:00"])
def test_reschedule_to_an_eta(
    eta: Any, app: Celery, delayed: Delayed, client: redis.Redis, told: list[Any]
) -> None:
    send(app, "a")
    send(app, "b")
    assert delayed.reschedule("a", eta=eta) is True
    due_ms = check_backlog(client, "celery")["a"]
    assert due_ms == 4_102_542_245_679  # whole milliseconds, and never early
    header = get(delayed, "a").headers["eta"]
    assert header == "2100-01-02T03:04:05.679000+00:00"
    assert told == [("a", header)]
    assert ids(delayed.find()) == ["b", "a"]


def test_reschedule_by_countdown_and_to_the_first_and_last_time_there_is(
    app: Celery, delayed: Delayed
) -> None:
    send(app, "a")
    assert delayed.reschedule("a", countdown=7200)
    found = get(delayed, "a")
    assert found.remaining
    assert abs(found.remaining - 2 * HOUR) < SEEN_LATE
    assert found.eta == datetime.fromisoformat(found.headers["eta"])
    assert delayed.reschedule("a", eta=datetime.max)
    assert get(delayed, "a").as_dict()["remaining_seconds"] > 0
    assert delayed.reschedule("a", eta="0001-01-01")
    assert get(delayed, "a").state == "ready"
    assert not delayed.reschedule("x", countdown=-5)


@pytest.mark.parametrize(
    ("to", "text"),
    [
        ({}, "either countdown"),
        ({"countdown": 1, "eta": AT}, "either countdown"),
        ({"eta": "soon"}, "eta='soon' is not a time: give a datetime or ISO 8601, such as 20"),
        ({"countdown": "5"}, "countdown='5' is not a time from now: give a number of seconds"),
        ({"countdown": float("nan")}, "countdown=nan"),
        ({"countdown": 1e12}, "countdown=1000000000000.0"),
    ],
)
def test_reschedule_refuses(
    to: dict[str, Any], text: str, app: Celery, delayed: Delayed, client: redis.Redis
) -> None:
    send(app, "a")
    before = check_backlog(client, "celery")
    with pytest.raises(QueryError, match=text):
        delayed.reschedule("a", **to)
    assert check_backlog(client, "celery") == before


def test_run_now(app: Celery, delayed: Delayed, told: list[Any]) -> None:
    send(app, "a", priority=6)
    assert delayed.run_now("a") is True
    assert delayed.run_now("x") is False
    assert told == [("a", None)]
    found = get(delayed, "a")
    assert (found.state, found.priority) == ("ready", 6)
    assert found.eta
    assert abs(found.eta - now()) < SEEN_LATE


def test_tasks_with_one_id(app: Celery, delayed: Delayed) -> None:
    for hours, name in ((1, "noop"), (2, "record"), (3, "late")):
        send(app, "a", hours, name)
    assert [(info.id, info.task) for info in delayed.find()] == [
        ("a", "noop"),
        ("a", "record"),
        ("a", "late"),
    ]
    assert delayed.reschedule("a", eta=AT)
    assert {info.eta.year for info in delayed.find() if info.eta} == {2100}
    outcome = delayed.cancel_many(Query(task="record"))
    assert (outcome.matched, outcome.changed) == (1, 1)
    assert {info.task for info in delayed.find()} == {"noop", "late"}
    assert delayed.cancel("a")
    info = delayed.get("a")
    assert info is not None
    assert info.state == "cancelled"


def test_queues_that_the_app_does_not_know(
    app: Celery, make: Callable[..., Celery], client: redis.Redis
) -> None:
    other: Delayed = make().delayed
    for id in ("cancel", "move", "run"):
        send(app, id, queue="elsewhere")
    assert other.queues() == ["celery", "elsewhere"]
    assert [info.queue for info in other.find()] == ["elsewhere"] * 3
    assert other.cancel("cancel")
    assert other.reschedule("move", countdown=9)
    assert other.run_now("run")
    found = get(other, "run")
    assert (found.state, found.queue) == ("ready", "elsewhere")
    assert not other.cancel("move", queue="celery")
    assert other.cancel("move", queue="elsewhere")
    client.delete("elsewhere", "{elsewhere}:wake")  # as a consumer takes message and token
    assert other.queues() == ["celery", "elsewhere"]
    assert [each.event for each in other.events(task_id="cancel")] == ["scheduled", "cancelled"]


@pytest.mark.parametrize("kind", ["messages", "unacked:host:1:ab", "dead-messages"])
def test_a_queue_of_which_little_is_left(kind: str, delayed: Delayed, client: redis.Redis) -> None:
    client.hset("{else:where}:" + kind, "a", "x")
    client.hset("{other}:" + kind + "-else", "a", "x")
    assert {*delayed.queues()} == {"celery", "else:where"} | (
        {"other"} if kind.startswith("unacked") else set()
    )


@pytest.mark.parametrize("prefix", ["", "shop:", "a[b]*?\\{x}:"])
def test_many_queues_under_a_prefix(
    prefix: str, make: Callable[..., Celery], client: redis.Redis
) -> None:
    app = make(global_keyprefix=prefix)
    names = [f"q{n}" for n in range(12)] + ["a:b", "{tag}", "ü"]
    for name in names:
        send(app, f"in {name}", queue=name)
    client.hset(b"{\xff}:dead", b"x", b"y")  # belongs to another program
    client.set("{other}:cache", "z")
    other: Delayed = make(global_keyprefix=prefix).delayed
    assert set(names) <= {*other.queues()}
    assert {info.id: info.queue for info in other.find()} == {f"in {name}": name for name in names}
    assert ids(other.find(queue="ü")) == ["in ü"]
    counts = other.counts()
    assert [counts[name].delayed for name in names] == [1] * len(names)
    assert other.cancel_many(Query()).queues == dict.fromkeys(sorted(names), 1)
    assert not [key for key in client.keys("*") if key.endswith(b":messages")]


@pytest.fixture
def shop(app: Celery) -> Delayed:
    """Tasks of two tenants in two queues, and of a name in another script."""
    send(app, "1", 1, "app.send_mail", headers={"tenant": "ada", "try": 1, "x": [1, "a"]})
    send(app, "2", 2, "app.send_sms", headers={"tenant": "bob", "try": 2, "x": {"a": True}})
    send(app, "3", 3, "app.report", headers={"tenant": "ada", "flag": True, "none": None})
    send(app, "4", 4, "app.send_mail", queue="slow", headers={"tenant": "ada", "f": 0.5})
    send(app, "5", 5, "größe.messen", headers={"tenant": "größe", "x": "[1, 'a']"})
    send(app, "6", 6, "app.[x]", args=('"task": "app.report"', {"tenant": "bob"}))
    found: Delayed = app.delayed
    return found


@pytest.mark.parametrize(
    ("criteria", "expected"),
    [
        ({}, "123564"),
        ({"task": "app.send_mail"}, "14"),
        ({"task": "app.s[em]*"}, "124"),
        ({"task": "app.[!s]*"}, "36"),
        ({"task": "app.[[]x]"}, "6"),
        ({"task": "*ö?e*"}, "5"),
        ({"task": "APP.*"}, ""),
        ({"queue": "slow"}, "4"),
        ({"tenant": "ada"}, "134"),
        ({"tenant": "größe"}, "5"),
        ({"header": {"try": 2}}, "2"),
        ({"header": {"flag": True}}, "3"),
        ({"header": {"none": None}}, "3"),
        ({"header": {"f": "0.5"}}, "4"),
        ({"header": {"x": [1, "a"]}}, "15"),
        ({"header": {"missing": None}}, ""),
        ({"header": {"try": 1, "tenant": "ada"}}, "1"),
        ({"task": "app.send_*", "tenant": "ada", "queue": "slow"}, "4"),
        ({"task": "app.report", "header": {"tenant": "bob"}}, ""),
        ({"due_after": 1.5}, "23564"),
        ({"due_before": 2.5}, "12"),
        ({"due_after": 1.5, "due_before": 4.5, "tenant": "ada"}, "34"),
    ],
)
def test_find(criteria: dict[str, Any], expected: str, shop: Delayed) -> None:
    def find(form: Callable[[datetime], Any]) -> str:
        given = {
            name: form(in_hours(value)) if name.startswith("due") else value
            for name, value in criteria.items()
        }
        assert shop.count(Query(**given)) == len(expected)
        return "".join(ids(shop.find(**given)))

    assert find(lambda at: at) == expected
    assert find(lambda at: at.replace(tzinfo=None).isoformat()) == expected


def test_find_by_the_bounds_of_time(app: Celery, delayed: Delayed) -> None:
    app.send_task("record", task_id="a", eta=AT)
    due = delayed.get("a")
    assert due
    at, after = due.eta, due.eta + timedelta(milliseconds=1)  # type: ignore[operator]
    assert ids(delayed.find(due_after=at)) == ["a"]
    assert ids(delayed.find(due_after=at, due_before=after)) == ["a"]
    assert ids(delayed.find(due_after=after)) == []
    assert ids(delayed.find(due_before=at)) == []


def test_find_is_lazy(app: Celery, delayed: Delayed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "PAGE_SIZE", 2)
    for n in range(6):
        send(app, str(n), 1 + n)
    found = delayed.find()
    assert next(found).id == "0"
    app.control.purge()
    assert ids(found) == ["1"]


@pytest.mark.parametrize(
    ("criteria", "text"),
    [
        ({"due_before": "soon"}, "due_before='soon' is not a time: give a datetime or ISO 8601"),
        ({"due_after": 5}, "due_after=5 is not a time"),
        ({"due_after": AT, "due_before": AT - HOUR}, "is later than due_before"),
        ({"task": ""}, "task='' is not text: to select all, leave it out"),
        ({"tenant": 0}, "tenant=0 is not text"),
        ({"queue": ""}, "queue=''"),
        ({"root_id": 5}, "root_id=5"),
        ({"header": "x=1"}, "header takes a dict of headers, not 'x=1'"),
    ],
)
def test_find_refuses(criteria: dict[str, Any], text: str, delayed: Delayed) -> None:
    """It raises at once, not when the first task is read."""
    with pytest.raises(QueryError, match=text):
        delayed.find(**criteria)
    with pytest.raises(ValueError, match=text):
        Query(**criteria)


@pytest.mark.parametrize("wrong", [None, {}, "a text", ["a list"]])
def test_what_is_not_a_query(wrong: Any, delayed: Delayed) -> None:
    calls = [
        lambda: delayed.cancel_many(wrong),
        lambda: delayed.count(wrong),
        lambda: delayed.run_now_many(wrong),
        lambda: delayed.reschedule_many(wrong, by=1),
        lambda: delayed.redirect_many(wrong, "celery"),
        *([] if wrong is None else [lambda: delayed.find(wrong)]),
    ]
    for call in calls:
        with pytest.raises(QueryError, match="is not a query: give one such as"):
            call()


def test_an_empty_name_does_not_mean_all_queues(app: Celery, delayed: Delayed) -> None:
    """Such as of a variable that is not set."""
    send(app, "dead", -1)
    bury(delayed.store, "dead")
    for verb in (delayed.dead.replay, delayed.dead.purge):
        with pytest.raises(QueryError, match="queue='' is not text: to select all, leave it out"):
            verb(queue="")
    with pytest.raises(QueryError, match="there is no queue ''"):
        delayed.policies.apply("")
    assert delayed.counts("celery")["celery"].dead == 1


@pytest.mark.parametrize("wrong", [None, 5, ["a"], AsyncResult("a")])
def test_what_is_not_an_id(wrong: Any, delayed: Delayed) -> None:
    calls = [
        lambda: delayed.get(wrong),
        lambda: delayed.history(wrong),
        lambda: delayed.cancel(wrong),
        lambda: delayed.cancel_ids(["a", wrong]),
        lambda: delayed.reschedule(wrong, countdown=1),
        lambda: delayed.run_now(wrong),
        lambda: delayed.terminate(wrong),
        lambda: delayed.redirect(wrong, "celery"),
        lambda: delayed.change(wrong, priority=1),
        lambda: delayed.dead.replay(["a", wrong]),
        lambda: delayed.dead.purge(["a", wrong]),
    ]
    for call in calls:
        with pytest.raises(QueryError, match="is not the id of a task: give text, such as"):
            call()


def test_one_id_where_several_may_be(app: Celery, delayed: Delayed) -> None:
    app.send_task("app.x", task_id="abc", countdown=3600)
    app.send_task("app.x", task_id="a", countdown=3600)
    assert delayed.cancel_ids("abc") == {"abc"}


def test_an_empty_query_means_all() -> None:
    assert Query().is_empty
    assert Query(header={}).is_empty
    assert not Query(task="*").is_empty


def test_find_among_what_cannot_be_read(app: Celery, delayed: Delayed) -> None:
    """A dead letter that is no JSON may be replayed at a later time."""
    delayed.store.client.lpush("celery", '{"task": "\\u12", not JSON')
    delayed.store.deliver("celery", "C", 1, 1, lease_ms=1000)
    delayed.store.bury("celery", "C", [(1, "bad", "unreadable", b"")])
    assert delayed.dead.replay(["bad"], at=AT) == 1
    send(app, "a", headers={"tenant": "ada"})
    assert ids(delayed.find(tenant="ada")) == ["a"]
    assert ids(delayed.find(task="*")) == ["a", "bad"]
    assert [info.as_dict()["id"] for info in delayed.find()] == ["a", "bad"]
    assert delayed.cancel("bad")


@pytest.fixture
def many(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Delayed:
    """Sixty tasks, a minute apart and two at a time, in pages of seven; every third is Ada's."""
    monkeypatch.setattr(backlog_module, "PAGE_SIZE", 7)
    start = in_hours(1).replace(microsecond=0)
    for n in range(60):
        app.send_task(
            "record",
            task_id=f"{n:02}",
            eta=start + timedelta(minutes=n // 2),
            headers={"tenant": "ada" if n % 3 == 0 else "bob"},
        )
    found: Delayed = app.delayed
    found.store.partition_size = 16
    return found


ADAS = [f"{n:02}" for n in range(0, 60, 3)]


def due_times(delayed: Delayed) -> dict[str, int]:
    return check_backlog(delayed.store.client, "celery")


def test_cancel_many(many: Delayed, told: list[Any]) -> None:
    before = due_times(many)
    steps: list[int] = []
    outcome = many.cancel_many(Query(tenant="ada"), dry_run=True, progress=steps.append)
    assert (outcome.matched, outcome.changed, outcome.dry_run) == (20, 0, True)
    assert outcome.queues == {"celery": 20}
    assert ids(outcome.sample) == ADAS[:10]
    assert (due_times(many), told, sum(steps)) == (before, [], 20)
    outcome = many.cancel_many(Query(tenant="ada"), progress=steps.append)
    assert (outcome.matched, outcome.changed, outcome.dry_run) == (20, 20, False)
    assert sum(steps) == 40
    assert due_times(many) == {id: at for id, at in before.items() if id not in ADAS}
    assert told == [("cancelled", id) for id in ADAS]


@pytest.mark.parametrize("minutes", [-70, -10, 0, 3, 40])
@pytest.mark.parametrize("query", [Query(), Query(tenant="ada")])
def test_reschedule_many_by(query: Query, minutes: float, many: Delayed, told: list[Any]) -> None:
    """Each is moved once, no matter where it lands among those still to be read."""
    before = due_times(many)
    meant = sorted(before) if query.is_empty else ADAS
    by = timedelta(minutes=minutes)
    assert many.reschedule_many(query, by=by, dry_run=True).matched == len(meant)
    assert due_times(many) == before
    outcome = many.reschedule_many(query, by=by)
    assert (outcome.matched, outcome.changed) == (len(meant), len(meant))
    moved = {id: before[id] + round(minutes * 60_000) for id in meant}
    soon = now().timestamp() * 1000
    assert due_times(many) == {id: at for id, at in {**before, **moved}.items() if at > soon}
    assert [id for id, _ in told] == meant
    assert many.counts()["celery"].ready == sum(at <= soon for at in moved.values())


def test_reschedule_many_to_and_spread(many: Delayed) -> None:
    before = due_times(many)
    to = in_hours(1.25).replace(microsecond=0)
    start_ms = round(to.timestamp() * 1000)
    assert many.reschedule_many(Query(tenant="ada"), to=to).changed == 20
    assert due_times(many) == {**before, **dict.fromkeys(ADAS, start_ms)}
    assert many.reschedule_many(Query(tenant="ada"), to=to, spread=10 * HOUR).changed == 20
    after = due_times(many)
    assert sorted(after[id] for id in ADAS) == [start_ms + n * 1_800_000 for n in range(20)]
    many.reschedule_many(Query(tenant="ada"), spread=10 * HOUR)
    later = [info.eta for info in many.find(tenant="ada") if info.eta]
    assert len(later) == 19  # the first is ready
    assert {(b - a) for a, b in itertools.pairwise(later)} == {HOUR / 2}
    assert many.reschedule_many(Query(), to=now() - HOUR).changed == 59
    assert many.counts()["celery"].ready == 60


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({}, "takes by=, or to= and spread=, or one"),
        ({"by": HOUR, "spread": HOUR}, "takes by="),
        ({"by": "soon"}, "by='soon' is not a length of time: give seconds"),
        ({"to": "soon"}, "to='soon' is not a time"),
        ({"spread": -1}, "spread is a length of time from 0 on, not -1"),
    ],
)
def test_reschedule_many_refuses(how: dict[str, Any], text: str, many: Delayed) -> None:
    before = due_times(many)
    with pytest.raises(QueryError, match=text):
        many.reschedule_many(Query(), **how)
    assert due_times(many) == before


def test_counts(app: Celery, delayed: Delayed) -> None:
    for n in range(3):
        send(app, str(n), 1 + n)
    send(app, "b", 1, queue="other")
    for id in ("dead", "held", "ready"):
        app.send_task("record", task_id=id)
    bury(delayed.store, "dead")
    delayed.store.deliver("celery", "C", 1, 2, lease_ms=60_000)
    delayed.store.now = "+5400000"
    found = delayed.counts()
    assert set(found) == {"celery", "other"}
    counts = found["celery"]
    assert (counts.delayed, counts.due, counts.ready) == (3, 1, 1)
    assert (counts.unacked, counts.dead) == (1, 1)
    assert delayed.counts("other")["other"].delayed == found["other"].delayed == 1


def test_forecast(delayed: Delayed) -> None:
    start = in_hours(2).replace(microsecond=0)
    for n, minutes in enumerate((-90, -1, 0, 29, 30, 89, 119, 120, 500)):
        due_ms = round((start + timedelta(minutes=minutes)).timestamp() * 1000)
        delayed.store.schedule(("celery", "other")[n % 2], [entry(f"{n}", due_ms)])
    found = delayed.forecast(2, 4, start=start)
    assert (found.overdue, found.later, found.total) == (2, 2, 9)
    assert [bucket.count for bucket in found.buckets] == [2, 1, 1, 1]
    assert [bucket.start for bucket in found.buckets] == [start + n * HOUR / 2 for n in range(4)]
    assert delayed.forecast(2, 4, queue="other", start=start).total == 4


@pytest.mark.parametrize(
    "how",
    [*({"hours": n} for n in (0, float("nan"), 1e9, "1")), {"buckets": 250}, {"start": "now"}],
)
def test_forecast_refuses(how: dict[str, Any], delayed: Delayed) -> None:
    with pytest.raises(QueryError, match="a forecast takes a number of hours, 1 to 249 buckets"):
        delayed.forecast(**how)


def test_dead_letters(app: Celery, delayed: Delayed) -> None:
    for n in range(4):
        app.send_task("record", task_id=f"{n}")
        bury(delayed.store, f"{n}", f"reason {n}")
    app.send_task("record", task_id="far", queue="elsewhere")
    bury(delayed.store, "far", queue="elsewhere")
    dead = delayed.dead
    assert [each.letter.id for each in dead.list()] == ["0", "1", "2", "3", "far"]
    assert [each.info.id for each in dead.list("elsewhere")] == ["far"]
    shown = dead.show("2")
    assert shown
    assert (shown.queue, shown.info.reason, shown.info.task) == ("celery", "reason 2", "record")
    assert abs(shown.at - now()) < SEEN_LATE
    assert dead.show("x") is dead.show("far", "celery") is None
    assert dead.replay(["0", "x"]) == 1
    assert dead.replay("1", at=AT) == 1
    assert [get(delayed, id).state for id in "012"] == ["ready", "delayed", "dead"]
    assert (dead.purge(["2"]), dead.purge(queue="elsewhere"), dead.replay()) == (1, 1, 1)
    assert [*dead.list()] == []
    with pytest.raises(QueryError, match="at='soon' is not a time"):
        dead.replay(at="soon")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://:secret@127.0.0.1/0", r"redis://:\*\*@127.* keeps no backlog: put delayed\+"),
        ("memory://", "memory://.* keeps no backlog: use a Redis server, with a URL such as"),
    ],
)
def test_a_broker_without_a_backlog(url: str, text: str, make: Callable[..., Celery]) -> None:
    delayed: Delayed = make(url).delayed
    for call in (delayed.queues, lambda: delayed.cancel("a"), lambda: delayed.dead.show("a")):
        with pytest.raises(BrokerError, match=text):
            call()


QUICK = {"task_publish_retry_policy": {"max_retries": 0}}


def test_a_lost_connection(server: Server, make: Callable[..., Celery], app: Celery) -> None:
    send(app, "a")
    with Proxy(server.port or 0) as proxy:
        delayed: Delayed = make(f"delayed+redis://127.0.0.1:{proxy.port}/0", QUICK).delayed
        for call in (delayed.queues, lambda: delayed.cancel("x"), lambda: delayed.dead.show("x")):
            assert delayed.get("a")
            proxy.cut()
            with pytest.raises(OperationalError):
                call()
            proxy.heal()
        proxy.cut()
        proxy.heal()
        with contextlib.suppress(OperationalError):
            delayed.get("a")
        assert ids(delayed.find()) == ["a"]


def test_a_lost_connection_with_another_url(
    server: Server, make: Callable[..., Celery], app: Celery
) -> None:
    send(app, "a")
    with Proxy(server.port or 0) as first:
        urls = f"delayed+redis://127.0.0.1:{first.port}/0;delayed+{server.url}"
        delayed: Delayed = make(urls).delayed
        assert delayed.get("a")
        first.cut()
        delayed.store.shards.look_again()  # as some seconds later
        with pytest.raises(OperationalError):
            delayed.get("a")
        assert delayed.get("a")


def test_close(app: Celery, delayed: Delayed) -> None:
    send(app, "a")
    dead = delayed.dead
    delayed.close()
    delayed.close()
    assert delayed.get("a")
    assert [*dead.list()] == []


def test_a_fork_while_another_thread_connects(app: Celery, delayed: Delayed) -> None:
    is_connecting, may_go_on = threading.Event(), threading.Event()

    def connect() -> None:
        with delayed._lock:
            is_connecting.set()
            may_go_on.wait(60)

    send(app, "a")
    thread = threading.Thread(target=connect)
    thread.start()
    is_connecting.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for ever
        os._exit(0 if delayed.get("a") else 1)
    assert os.waitpid(child, 0)[1] == 0
    may_go_on.set()
    thread.join()


def test_a_fork_has_a_connection_of_its_own(app: Celery, delayed: Delayed) -> None:
    for n in range(200):
        send(app, str(n))
    assert delayed.get("0")
    child = os.fork()
    if child == 0:
        good = all(len(ids(delayed.find())) == 200 for _ in range(20))
        os._exit(0 if good else 1)
    assert all(len(ids(delayed.find())) == 200 for _ in range(20))
    assert os.waitpid(child, 0)[1] == 0
    assert delayed.get("0")
