"""Tasks are looked up, moved and cancelled while part of a Cluster cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from celery import Celery
from kombu import Queue
from kombu.exceptions import OperationalError

import celery_ext
from celery_ext import Delayed, Query
from celery_ext.control.changes.redirect import Redirect
from celery_ext.http.pages.site import VIEWS
from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.connection.cluster import connection as module
from kombu_delayed.connection.cluster import nodes
from kombu_delayed.connection.cluster.nodes import Cluster as Map
from kombu_delayed.connection.cluster.nodes import Node
from kombu_delayed.errors import NodeDown
from tests.kit.cli import run
from tests.kit.clusters import Cluster
from tests.kit.http import api_client
from tests.kit.servers import Server
from tests.kit.wait import wait_until


@pytest.fixture
def app(cluster: Cluster, names: list[str]) -> Iterator[Celery]:
    """An app with three queues, each on another node."""
    with Celery(broker=f"delayed+{cluster.url}") as app:
        app.conf.task_queues = [Queue(name) for name in names]
        app.conf.broker_transport_options = {"delayed_replicas_to_wait": 0}
        celery_ext.install(app)
        for name in names:
            for n in range(3):
                app.send_task("task", task_id=f"{name}-{n}", countdown=3600, queue=name)
        yield app
    cluster.flush()


def cut_off(port: int, patch: pytest.MonkeyPatch) -> None:
    """Make a node unreachable for all connections."""
    reach = Map.reach

    def reach_others(self: Map, node: Node, connect: Any, **how: Any) -> Any:
        if node.port == port:
            raise NodeDown(f"node {node} is cut off")
        return reach(self, node, connect, **how)

    patch.setattr(Map, "reach", reach_others)


@pytest.fixture
def others(
    app: Celery, cluster: Cluster, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The queues that can be used while the node of the first one is down."""
    cut_off(cluster.master_of(names[0]).port or 0, monkeypatch)
    return names[1:]


class Told(Exception):
    """A client of the HTTP API was told this."""


def pause_over_http(app: Celery, queue: str, **part: str) -> None:
    with api_client(app) as api:
        answer = api.post(f"/v1/queues/{queue}/pause", json=part)
        assert answer.status_code == 503
        assert "127.0.0.1" not in answer.text
        raise Told(answer.json()["detail"])


def where(delayed: Delayed, queue: str) -> set[str]:
    return {info.id for info in delayed.find(queue=queue)}


def test_what_is_on_other_nodes_is_found_and_changed(
    app: Celery, names: list[str], others: list[str]
) -> None:
    delayed, (one, two) = app.delayed, others
    found = delayed.get(f"{one}-0")
    assert found is not None
    assert found.queue == one
    assert delayed.reschedule(f"{one}-0", countdown=7200)
    assert delayed.change(f"{one}-0", args=(1,))
    again = delayed.get(f"{one}-0")
    assert again is not None
    assert again.args == "(1,)"
    assert (again.due_ms or 0) > (found.due_ms or 0) + 3_000_000
    assert delayed.redirect(f"{one}-0", two)
    assert delayed.cancel(f"{two}-1")
    assert where(delayed, one) == {f"{one}-1", f"{one}-2"}
    assert where(delayed, two) == {f"{one}-0", f"{two}-0", f"{two}-2"}
    cancelled = delayed.history(f"{two}-1")
    assert cancelled is not None
    assert cancelled.state == "cancelled"


@pytest.mark.parametrize("verb", ["get", "history", "cancel", "run_now"])
def test_what_may_be_on_the_node_is_an_error(
    app: Celery, names: list[str], others: list[str], verb: str
) -> None:
    for id in (f"{names[0]}-0", "nobody"):
        with pytest.raises(OperationalError, match="is cut off"):
            getattr(app.delayed, verb)(id)


def test_the_http_api_finds_and_changes_what_is_on_other_nodes(
    app: Celery, names: list[str], others: list[str]
) -> None:
    one, two = others
    with api_client(app) as api:
        path = f"/v1/tasks/{one}-0"
        assert api.get(path).json()["queue"] == one
        assert api.patch(path, json={"priority": 0}).json()["queue"] == one
        assert api.post(f"/v1/tasks/{two}-0/run-now").status_code == 200
        assert api.get(f"/v1/tasks/{two}-0").json()["status"] == "waiting"
        assert api.patch(f"/v1/tasks/{two}-0", json={"delay": 60}).json()["queue"] == two
        assert api.delete(path).status_code == 204
        assert api.get(path).json()["status"] == "cancelled"
        assert api.get(f"{path}/history").json()["state"] == "cancelled"
        for id in (f"{names[0]}-0", "nobody"):
            answers = [api.get(f"/v1/tasks/{id}"), api.delete(f"/v1/tasks/{id}")]
            assert [each.status_code for each in answers] == [503, 503]


def test_the_dashboard_shows_what_is_on_other_nodes(
    app: Celery, names: list[str], others: list[str]
) -> None:
    told = "A node of the Cluster does not answer: its queues are missing here."
    with api_client(app) as api:
        of_queues = {view.path for view in VIEWS} - {"/task", "/periodic", "/limit"}
        pages = {path: api.get(path) for path in of_queues}
        assert {page.status_code for page in pages.values()} == {200}
        assert {path for path, page in pages.items() if told not in page.text} == set()
        page = api.get("/backlog").text
        assert [name for name in names if f"{name}-0" in page] == others
        with api.stream("GET", "/live/backlog") as stream:
            look = next(line for line in stream.iter_lines() if line.startswith("data: "))
        assert told in look
        assert api.get("/task", params={"id": f"{others[0]}-0"}).status_code == 200
        for id in (f"{names[0]}-0", "nobody"):
            assert api.get("/task", params={"id": id}).status_code == 503


def test_the_doctor_examines_the_other_nodes(
    app: Celery, cluster: Cluster, names: list[str], others: list[str]
) -> None:
    found = run(app, "doctor", "--json")
    assert found.exit_code == 1, found.output
    told = json.loads(found.stdout)
    assert told["queues"] == sorted(others)
    down = f"127.0.0.1:{cluster.master_of(names[0]).port}"
    assert [each["examples"] for each in told["findings"] if each["kind"] == "nodes"] == [[down]]
    assert f"does not answer: {down}" in run(app, "doctor").stdout
    assert run(app, "doctor", "-Q", others[0], "--json").exit_code == 1
    assert "no node with these queues answers" in run(app, "doctor", "-Q", names[0]).stderr


@pytest.mark.parametrize("of", [["count"], ["list"], ["find", "-t", "*"], ["partitions"]])
def test_what_is_on_other_nodes_is_shown(
    of: list[str], app: Celery, cluster: Cluster, names: list[str], others: list[str]
) -> None:
    found = run(app, *of)
    assert [name for name in names if name in found.stdout] == others
    down = f"127.0.0.1:{cluster.master_of(names[0]).port}"
    assert f"No answer from {down}: its queues are missing here." in found.stderr
    assert found.exit_code == 1
    assert run(app, *of, "-Q", others[0]).exit_code == 0
    assert "is cut off" in run(app, *of, "-Q", names[0]).stderr


def test_watch_shows_what_is_on_other_nodes(
    app: Celery, cluster: Cluster, names: list[str], others: list[str]
) -> None:
    down = f"127.0.0.1:{cluster.master_of(names[0]).port}"
    look = json.loads(run(app, "watch", "--times", "1", "--json").stdout)
    assert (sorted(look["counts"]), look["down"]) == (sorted(others), [down])
    assert f"No answer from {down}" in run(app, "watch", "--times", "1").stdout


def test_those_of_other_nodes_are_cancelled_with_the_rest_in_doubt(
    app: Celery, names: list[str], others: list[str]
) -> None:
    ids = [f"{name}-0" for name in names]
    assert app.delayed.cancel_ids(ids[1:]) == {*ids[1:]}
    with pytest.raises(OperationalError):
        app.delayed.cancel_ids([f"{name}-1" for name in names])
    for name in others:
        assert where(app.delayed, name) == {f"{name}-2"}


@pytest.mark.parametrize("part", [{}, {"tenant": "ada"}])
def test_shards_of_other_nodes_are_paused_and_resumed(
    part: dict[str, str],
    app: Celery,
    cluster: Cluster,
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delayed, queue = app.delayed, names[0]
    app.conf.broker_transport_options["delayed_shards"] = {queue: 3}  # each on another node

    def paused() -> list[bool]:
        store, shards = delayed.store, delayed.shards(queue)
        texts = [each.text for each in store.policies.read_all(shards)]
        whole = [store.pauses.of(shard) is not None for shard in shards]
        return [each or "ada" in text for each, text in zip(whole, texts, strict=True)]

    def on_two_nodes(change: Callable[..., Any]) -> None:
        """The node of the second shard cannot be reached."""
        delayed.close()
        with monkeypatch.context() as patch:
            cut_off(cluster.master_of(delayed.store.keys(f"{queue}\x1f1").wake).port or 0, patch)
            delayed.close()
            with pytest.raises(
                (OperationalError, Told), match="is changed on the other nodes only"
            ):
                change(queue, **part)

    on_two_nodes(delayed.pause)
    assert paused() == [True, False, True]
    delayed.resume(queue, **part)
    on_two_nodes(partial(pause_over_http, app))
    assert paused() == [True, False, True]
    delayed.pause(queue, **part)
    on_two_nodes(delayed.resume)
    assert paused() == [False, True, False]
    delayed.resume(queue, **part)
    assert paused() == [False] * 3


def test_queues_of_other_programs_are_found_on_a_node_that_was_added(
    app: Celery, cluster: Cluster, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has redirected this process there."""
    monkeypatch.setattr(nodes, "LOOK_SECONDS", 0.0)
    with Celery(broker=f"delayed+{cluster.url}", set_as_current=False) as other:
        other.send_task("task", task_id="far", countdown=3600, queue="others")
    assert "others" in app.delayed.queues()
    new, home = cluster.add_master(), cluster.master_of("others")
    try:
        cluster.move("others", new)
        assert "others" in app.delayed.queues()
        assert app.delayed.cancel("far")
    finally:
        cluster.move("others", home)
        cluster.remove(new)


class Moving:
    """Moves the slot of a queue to another node; the move ends once a caller waits for it."""

    def __init__(self, cluster: Cluster, queue: str, target: Server) -> None:
        self._cluster, self._queue, self._target = cluster, queue, target
        self.waited = 0

    def begin(self) -> None:
        self._cluster.begin_move(self._queue, self._target)

    def sleep(self, seconds: float) -> None:
        if not self.waited:
            wait_until(lambda: self._cluster.finish_move(self._queue, self._target), "it has moved")
        self.waited += 1


@pytest.fixture
def moving(
    app: Celery, cluster: Cluster, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Moving]:
    home = cluster.master_of(names[0])
    moving = Moving(cluster, names[0], cluster.master_of(names[1]))
    monkeypatch.setattr(module, "time", moving)
    yield moving
    cluster.move(names[0], home)


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        (lambda delayed, id: delayed.get(id).id, None),
        (lambda delayed, id: delayed.cancel(id), True),
        (lambda delayed, id: delayed.run_now(id), True),
        (lambda delayed, id: sum(1 for _ in delayed.find()), 9),
        (lambda delayed, id: delayed.cancel_many(Query()).changed, 9),
        (lambda delayed, id: sum(each.delayed for each in delayed.counts().values()), 9),
    ],
)
def test_a_slot_that_moves_is_waited_for(
    app: Celery, names: list[str], moving: Moving, verb: Callable[..., Any], expected: Any
) -> None:
    moving.begin()
    id = f"{names[0]}-0"
    assert verb(app.delayed, id) == (expected or id)
    assert moving.waited > 0


def test_a_slot_that_moves_after_a_task_was_copied(
    app: Celery, names: list[str], moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is then in one of the two queues."""
    put = Redirect._put

    def put_and_begin(self: Redirect, info: TaskInfo) -> bool:
        done = put(self, info)
        moving.begin()
        return done

    monkeypatch.setattr(Redirect, "_put", put_and_begin)
    assert app.delayed.redirect(f"{names[0]}-0", names[1])
    assert moving.waited > 0
    assert where(app.delayed, names[0]) == {f"{names[0]}-1", f"{names[0]}-2"}
    assert f"{names[0]}-0" in where(app.delayed, names[1])
