"""The page of a task shows its canvas and can terminate it."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from celery import Celery

from celery_ext import Delayed
from celery_ext.http.api import status
from kombu_delayed.store.outcomes.records import Kept, Note, Outcomes
from tests.kit.http import bearer
from tests.kit.pages import Visitor, sent


def note(delayed: Delayed, id: str, state: str, head: str, *lines: str) -> None:
    now, text = (
        int(time.time() * 1000),
        "\n".join(lines).replace("NOW", str(time.time_ns() // 10**6)),
    )
    notes = [Note(id, state, now, False, head + "\n", text + "\n")]
    calls = Outcomes(delayed.store).note_calls("celery", notes, Kept(100, 60_000_000), "w1:1:a")
    delayed.store.all_of(calls)


def runs(delayed: Delayed, id: str, *family: str) -> None:
    ids = "".join(f',"{each}"' for each in family)
    note(delayed, id, "s", f'["t","till.charge",null{ids}]', '["s",NOW,0,"w1:1:a",7]')


def test_parents_and_children(visitor: Visitor, app: Celery, delayed: Delayed) -> None:
    canvas: dict[str, Any] = {"root_id": "root", "parent_id": "middle"}
    app.send_task("till.charge", task_id="middle", root_id="root", parent_id="root", countdown=900)
    app.send_task("till.charge", task_id="delayed-child", countdown=900, **canvas)
    app.send_task("till.charge", task_id="ready-child", **canvas)
    app.send_task("till.charge", task_id="other", countdown=900)
    runs(delayed, "running-child", "root", "middle", "crowd")
    runs(delayed, "running-other")
    page = visitor.get("/task?id=middle")
    assert "/task?id=root" in page.links()
    assert "delayed-child" not in page.html
    page = visitor.get(next(link for link in page.links() if "canvas=1" in link))
    for id in ("delayed-child", "ready-child", "running-child"):
        assert f"/task?id={id}&queue=celery" in page.links()
    assert not any(f"/task?id={id}" in page.html for id in ("other", "running-other"))
    assert "3 other tasks of this canvas" in page.text
    assert page.html.count(">child<") == 3
    page = visitor.get("/task?id=running-child")
    assert {"/task?id=middle", "/task?id=root"} <= {*page.links()}
    assert "crowd" in page.text
    page = visitor.get("/task?id=root&canvas=1", 404)


def test_a_root_that_has_ended(visitor: Visitor, app: Celery, delayed: Delayed) -> None:
    done = '["+",NOW,0,5]'
    note(delayed, "root", "+", '["t","till.charge",null]', '["s",NOW,0,"w1:1:a",7]', done)
    app.send_task("till.charge", task_id="child", root_id="root", parent_id="root", countdown=900)
    page = visitor.get("/task?id=root&canvas=1")
    assert "/task?id=child&queue=celery" in page.links()
    assert "1 other task of this canvas waits" in page.text


@pytest.fixture
def revoked(api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tasks that workers are told to terminate."""
    told: list[Any] = []
    control = api.api.service.delayed.app.control  # type: ignore[attr-defined]
    monkeypatch.setattr(control, "revoke", lambda *given, **more: told.append((*given, more)))
    return told


TOLD = ("long", {"terminate": True, "signal": "SIGTERM"})


def test_terminate_over_http(
    api: httpx.Client, app: Celery, delayed: Delayed, revoked: list[Any]
) -> None:
    runs(delayed, "long")
    app.send_task("till.charge", task_id="later", countdown=900)
    answer = api.post("/v1/tasks/long/terminate")
    assert (answer.status_code, answer.json()["status"]) == (202, "running")
    assert revoked == [TOLD]
    done = '["+",NOW,0,5]'
    note(delayed, "done", "+", '["t","till.charge",null]', '["s",NOW,0,"w1:1:a",7]', done)
    for id in ("later", "done"):
        assert api.post(f"/v1/tasks/{id}/terminate").status_code == 409
    assert api.post("/v1/tasks/none/terminate").status_code == 404
    assert revoked == [TOLD]


def test_who_may_terminate(
    locked_api: httpx.Client, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, told = locked_api.api.service.delayed.app.control, []  # type: ignore[attr-defined]
    monkeypatch.setattr(control, "revoke", lambda *given, **more: told.append(given))
    runs(delayed, "long")
    path = "/v1/tasks/long/terminate"
    for token, expected in (
        (bearer(delayed, "schedule", "read"), 403),
        (bearer(delayed, "admin", tenants=("ada",)), 404),
        (bearer(delayed, "admin", queues=("elsewhere",)), 404),
        (bearer(delayed, "admin"), 202),
    ):
        assert told == []
        assert locked_api.post(path, headers=token).status_code == expected
    assert told == [("long",)]


def test_terminate_on_the_page(
    visitor: Visitor, app: Celery, delayed: Delayed, revoked: list[Any]
) -> None:
    runs(delayed, "long")
    app.send_task("till.charge", task_id="later", countdown=900)
    form = visitor.get("/task?id=long").form("/task/terminate")
    page = visitor.post(form.action, sent(form))
    assert "were told to terminate" in page.text
    assert revoked == [TOLD]
    assert not any("terminate" in each.action for each in visitor.get("/task?id=later").forms)


def test_a_task_that_moves_while_it_is_looked_for(
    api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.put("/v1/tasks/a", json={"task": "till.charge", "delay": "1h", "priority": 3})
    look, calls = status._look, []

    def blind_once(*given: Any) -> None:
        calls.append(given)
        if len(calls) > 2:
            look(*given)
        else:
            for ask, names in given[1]:
                ask.shards += names

    monkeypatch.setattr(status, "_look", blind_once)
    found = api.get("/v1/tasks/a").json()
    assert (found["status"], found["priority"]) == ("scheduled", 3)
