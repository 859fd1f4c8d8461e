"""A task that is revoked while delayed never runs, no matter who was running at that time."""

from __future__ import annotations

import base64
import json
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from celery import _state, chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import AsyncResult, GroupResult

from celery_ext import Query, install
from celery_ext.control.changes import revoked as revoked_module
from celery_ext.control.changes.revoked import Revoked
from kombu_delayed.inspection import backlog as backlog_module
from tests.kit.extended import Bench
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:Call to deprecated setex")]


def is_revoked(result: AsyncResult) -> bool:
    with pytest.raises(TaskRevokedError):
        result.get(timeout=60)
    return result.state == "REVOKED"


# With no worker alive.


def test_a_result(bench: Bench) -> None:
    result, other = bench.send("a"), bench.send("b")
    bench.send("ignored", ignore_result=True).revoke()
    for _ in range(2):
        result.revoke()
        bench.result("x").revoke()
    assert bench.backlog() == {"b"}
    assert is_revoked(result)
    assert {bench.result(id).state for id in ("x", "ignored")} == {other.state} == {"PENDING"}


@pytest.mark.parametrize("ids", ["a", ["a", "b"], {"a", "b"}, ("a", "b"), []])
def test_ids(ids: Any, bench: Bench) -> None:
    for id in "abc":
        bench.send(id)
    bench.app.control.revoke(iter(ids) if isinstance(ids, tuple) else ids)
    gone = {"a"} if ids == "a" else set() if ids == [] else {"a", "b"}
    assert bench.backlog() == set("abc") - gone
    assert {id for id in "abc" if bench.result(id).state == "REVOKED"} == gone
    bench.app.control.terminate("c")
    assert "c" not in bench.backlog()


@pytest.mark.parametrize("way", ["class", "attribute"])
def test_only_one_task_has_a_result_backend(way: str, bench: Bench) -> None:
    settings = Settings(bench.settings.broker_url)
    with make_app(settings) as app:
        own = bench.app.backend

        @app.task(name="kept", shared=False, **({"backend": own} if way == "class" else {}))
        def kept() -> None: ...

        if way == "attribute":
            kept.backend = own
        delayed = install(app)
        kept.apply_async(task_id="a", countdown=60)
        app.send_task("record", task_id="b", countdown=60)
        assert delayed.cancel_ids(["a", "b", "x"]) == {"a", "b"}
        delayed.close()
    assert bench.result("a").state == "REVOKED"
    assert bench.result("b").state == "PENDING"


@pytest.mark.parametrize("way", ["revoke", "cancel", "by query"])
def test_the_event_where_the_app_sends_those_of_tasks(way: str, server: Server) -> None:
    with (
        make_app(Settings(f"delayed+{server.url}")) as app,
        closing(install(app)) as delayed,
        server.client().pubsub() as listener,
    ):
        listener.psubscribe("*celeryev*")
        listener.get_message(timeout=60)
        for is_told in (False, True):
            app.conf.task_send_sent_event = is_told
            app.send_task("record", task_id=f"{is_told}", countdown=3600)
            if way == "revoke":
                app.control.revoke(f"{is_told}")
            elif way == "cancel":
                delayed.cancel(f"{is_told}")
            else:
                delayed.cancel_many(Query())
        found = [events_of(listener.get_message(timeout=60)) for _ in range(2)]
    sent, revoked = [event for each in found for event in each]
    assert (sent["type"], sent["uuid"]) == ("task-sent", "True")
    assert (revoked["type"], revoked["uuid"]) == ("task-revoked", "True")
    assert (revoked["terminated"], revoked["expired"]) == (False, False)


def events_of(message: Any) -> list[Any]:
    body = json.loads(message["data"])["body"]
    found = json.loads(base64.b64decode(body))
    return found if isinstance(found, list) else [found]


def test_without_a_result_backend(server: Server) -> None:
    with make_app(Settings(f"delayed+{server.url}")) as app:
        delayed = install(app)
        for id, queue in (("a", "celery"), ("b", "mail"), ("b", "mail"), ("c", "mail")):
            app.send_task("record", args=(queue,), task_id=id, countdown=60, queue=queue)
        assert delayed.cancel_ids(["a", "x", "b"]) == {"a", "b"}
        assert not delayed.cancel("a")
        assert [info.id for info in delayed.find()] == ["c"]
        delayed.close()


def test_a_result_backend_that_cannot_be_made(server: Server) -> None:
    url = f"delayed+{server.url}"
    with make_app(Settings(url)) as sender, make_app(Settings(url, "couchdb://nowhere")) as app:
        delayed = install(app)
        sender.send_task("record", task_id="a", countdown=60)
        assert delayed.cancel("a")
        delayed.close()


def test_a_revoke_of_some_workers_is_theirs(bench: Bench) -> None:
    bench.send("a")
    bench.app.control.revoke("a", destination=["w1@test"])
    bench.app.control.broadcast("revoke", {"task_id": "a"}, pattern="w*", matcher="glob")
    assert bench.backlog() == {"a"}


@pytest.mark.parametrize(
    ("headers", "left"),
    [
        ({"customer": "ada"}, "2345"),
        ({"customer": ["ada", "bob"]}, "245"),
        ({"customer": "a"}, "012345"),
        ({"region": "ada", "customer": ["bob"]}, "0124"),
        (["customer=bob"], "01245"),
        ({"größe": "ä"}, "01235"),
    ],
)
def test_stamped_headers(
    headers: Any, left: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog_module, "PAGE_SIZE", 2)
    stamps: list[dict[str, Any]] = [
        {"customer": "ada"},
        {"customer": ["eve", "ada"]},
        {},
        {"customer": ["bob"]},
        {"größe": "ä"},
        {"region": "ada"},
    ]
    for n, each in enumerate(stamps):
        bench.send(f"{n}", args=("customer", "ada"), stamped_headers=[*each], **each)
    bench.app.control.revoke_by_stamped_headers(headers)
    assert bench.backlog() == {*left}
    assert all(bench.result(id).state == "REVOKED" for id in {*"012345"} - {*left})


@pytest.mark.parametrize("value", [True, False, [True], -1, 0.5])
def test_stamps_that_are_no_texts(value: Any, bench: Bench) -> None:
    """JSON writes `true`, not `True`."""
    bench.send("a", stamped_headers=["vip"], vip=value)
    bench.send("b", stamped_headers=["vip"], vip="no")
    bench.app.control.revoke_by_stamped_headers({"vip": value})
    assert bench.backlog() == {"b"}


def test_a_result_that_is_there_stays(bench: Bench) -> None:
    bench.send("done")
    bench.send("failed")
    bench.app.backend.mark_as_done("done", 5)
    bench.app.backend.mark_as_failure("failed", KeyError("x"))
    bench.app.control.revoke(["done", "failed"])
    assert bench.backlog() == set()
    assert bench.result("done").result == 5
    assert bench.result("failed").state == "FAILURE"


def test_a_backend_that_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.send("a")
    monkeypatch.setattr(bench.app.backend, "mark_as_revoked", lambda *_, **__: 1 / 0)
    assert bench.app.delayed.cancel("a")
    assert "Task a is cancelled, but its result is not stored: division by zero" in caplog.text


@pytest.mark.parametrize("url", ["memory://", "redis://127.0.0.1:{port}/3"])
def test_a_broker_without_a_backlog(url: str, server: Server) -> None:
    with make_app(Settings(url.format(port=server.port))) as app:
        install(app)
        app.control.revoke("a")
        app.control.revoke_by_stamped_headers({"x": "y"})


# Canvas.


@pytest.mark.parametrize("ignore_result", [False, True])
def test_a_part_of_a_chord(
    bench: Bench, ignore_result: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chord fails as when a worker meets the revoked part."""
    # Celery 5.5 looks for the chord in the backend of the current app.
    monkeypatch.setattr(_state._tls, "current_app", bench.app)
    parts = [bench.signature("add", n, n, countdown=0) for n in range(3)]
    parts.append(bench.signature("add", 9, 9, task_id="part", ignore_result=ignore_result))
    result = chord(parts, app=bench.app)(bench.signature("total", countdown=0))
    with bench.worker(gossip=False):
        wait_until(
            lambda: all(each.ready() for each in result.parent.results[:3]), "the others are done"
        )
        assert bench.backlog() == {"part"}
        assert result.state == "PENDING"
        bench.app.control.revoke("part")
        wait_until(lambda: result.state == "FAILURE", "the chord has failed")
    assert isinstance(result.result, ChordError)
    assert str(result.result) == "Dependency part raised TaskRevokedError('cancelled')"


@pytest.mark.parametrize("by", ["", "group_id", "root_id"])
def test_a_group(bench: Bench, by: str) -> None:
    """In a group that is sent on its own, each part is its own root."""
    parts = [bench.signature("record", n) for n in range(5)]
    result: GroupResult = group(parts, app=bench.app).apply_async()
    bench.send("other")
    if by:
        meant = result.id if by == "group_id" else result.results[2].id
        bench.app.delayed.cancel_many(Query(**{by: meant}))
    else:
        result.revoke()
    gone = result.results[2:3] if by == "root_id" else result.results
    assert len(bench.backlog()) == 6 - len(gone)
    assert "other" in bench.backlog()
    assert all(is_revoked(each) for each in gone)


def test_cancel_a_chain_by_its_root(bench: Bench) -> None:
    """The first step has run and was the root; the step that waits now is cancelled."""
    steps = [bench.signature("record", 1, countdown=0), bench.signature("record")]
    steps.append(bench.signature("record", countdown=0))
    result = chain(*steps, app=bench.app).apply_async()
    first, second = result.parent.parent, result.parent
    with bench.worker(gossip=False):
        wait_until(lambda: bench.backlog() == {second.id}, "the second step waits")
        assert bench.app.delayed.cancel_many(Query(root_id=first.id)).changed == 1
        bench.send("sentinel", 0).get(timeout=60)
    assert bench.backlog() == set()
    assert is_revoked(second)
    assert result.state == "PENDING"
    assert bench.ledger.ids() == [first.id, "sentinel"]


# With workers, which are told as well and forget it when they exit.


@pytest.mark.smoke
@pytest.mark.parametrize("alive", [True, False], ids=["workers", "no worker"])
def test_it_never_runs(bench: Bench, alive: bool) -> None:
    """Its due time passes, as a later task shows; no worker that was told is alive then."""
    with ExitStack() as stack:
        if alive:
            for name in ("w1", "w2"):
                stack.enter_context(bench.worker(name))
            bench.wait_for_answers(2)
        result = bench.send("a", 2)
        sentinel = bench.send("sentinel", 2.1)
        if alive:
            replies = bench.app.control.revoke("a", reply=True, timeout=30, limit=2)
            assert len(replies) == 2
        else:
            result.revoke()
        assert is_revoked(result)
    with bench.worker("next"):
        assert sentinel.get(timeout=60)
    assert bench.ledger.ids() == ["sentinel"]
    assert is_revoked(result)


@pytest.mark.smoke
def test_terminate_kills_what_runs(bench: Bench) -> None:
    with bench.worker(pool="prefork"):
        running = bench.app.send_task("sleep", (60,))
        waiting = bench.send("waiting")
        bench.ledger.wait_for(1)
        bench.app.control.revoke([running.id, waiting.id], terminate=True, signal="SIGKILL")
        assert bench.backlog() == set()
        wait_until(lambda: running.state == "REVOKED", "the running one was killed")
    assert is_revoked(waiting)


@pytest.mark.smoke
def test_the_command_line(bench: Bench) -> None:
    """`celery control revoke` does not call `app.control.revoke`."""
    bench.send("a")
    bench.send("b", stamped_headers=["customer"], customer="ada")
    bench.send("c")
    with bench.worker():
        bench.wait_for_answers()
        for command in (["revoke", "a"], ["revoke_by_stamped_headers", "customer=ada"]):
            bench.run_celery("control", *command)
    assert bench.backlog() == {"c"}


@pytest.mark.smoke
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_sender_that_knows_no_backlog(bench: Bench, pool: str) -> None:
    """Flower may be started with the URL of the stock transport, and other programs may be, too."""
    for id in ("a", "b", "c", "kept"):
        bench.send(id)
    url = bench.settings.broker_url.removeprefix("delayed+")
    with bench.worker(pool=pool), make_app(Settings(url)) as stock:
        bench.wait_for_answers()
        stock.control.revoke("kept", destination=["other@host"])
        stock.control.revoke(["a", "b"])
        stock.control.terminate("c")
        wait_until(lambda: bench.backlog() == {"kept"}, "the others are gone")
    assert {*Revoked(bench.app.delayed).since(0)} == {"a", "b", "c"}
    assert is_revoked(bench.result("a"))


@pytest.mark.smoke
def test_a_task_revokes_another(bench: Bench) -> None:
    """From the child of a prefork worker, whose parent has a connection already."""
    bench.send("other")
    with bench.worker(pool="prefork"):
        bench.wait_for_answers()
        assert bench.app.control.inspect(limit=1).scheduled()  # the parent connects
        bench.app.send_task("revoke_from_task", ("other",)).get(timeout=60)
    assert bench.backlog() == set()


def test_what_is_ready_stays_revoked_without_a_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revoked_module, "KEPT_IDS", 3)
    monkeypatch.setattr(revoked_module, "PAGE_SIZE", 2)
    for id in ("a", "b", "other"):
        bench.send(id, countdown=0)
    bench.app.control.revoke(["old-1", "old-2", "old-3"])
    bench.app.control.revoke("for-one", destination=["w9@test"])
    bench.result("a").revoke()
    bench.app.control.revoke(["b", "x" * 300])
    remembered = Revoked(bench.app.delayed)
    assert {*remembered.since(0)} == {"old-3", "a", "b"}
    assert remembered.since(time.time() + 60) == []
    with bench.worker(gossip=False):
        bench.ledger.wait_for(1)
        assert is_revoked(bench.result("a"))
        assert is_revoked(bench.result("b"))
    assert bench.ledger.ids() == ["other"]


def test_a_thousand_in_a_row(bench: Bench, tmp_path: Path) -> None:
    """They wait for the same process; each passes its turn on without nesting in the last one."""
    door, ids = tmp_path / "door", [f"revoked-{n}" for n in range(1_000)]
    with bench.worker(pool="prefork", options=["--prefetch-multiplier", "2000"]) as worker:
        bench.app.send_task("until", (str(door),), task_id="first")
        bench.ledger.wait_for_all(["first"])
        for id in ids:
            bench.app.send_task("record", task_id=id)
        wait_until(lambda: bench.app.delayed.counts("celery")["celery"].ready == 0, "it has all")
        bench.app.control.revoke(ids, reply=True)
        door.touch()
        bench.app.send_task("record", task_id="last")
        bench.ledger.wait_for_all(["last"])
        assert worker.running
    assert {*bench.ledger.ids()} == {"first", "last"}
