"""Pause and resume over HTTP, and on the page of a queue."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from celery import Celery

from celery_ext import Delayed
from tests.kit.http import Serve, bearer
from tests.kit.pages import Visitor, sent

PATH = "/v1/queues/celery"


def test_pause_and_resume(api: httpx.Client, delayed: Delayed) -> None:
    assert api.get(f"{PATH}/pause").json()["paused"] is False
    answer = api.post(f"{PATH}/pause", json={"for": "2h", "why": "a migration"})
    assert (answer.status_code, answer.json()["by"]) == (200, "anybody")
    found = api.get(f"{PATH}/pause").json()
    assert found == answer.json()
    assert (found["paused"], found["why"], found["until"] > found["since"]) == (
        True,
        "a migration",
        True,
    )
    assert [each.queue for each in delayed.pauses()] == ["celery"]
    assert api.get(f"{PATH}/metrics").json()["paused"] is True
    assert api.post(f"{PATH}/resume").json()["paused"] is False
    assert delayed.pauses() == []


def test_who_may_not(app: Celery, delayed: Delayed, serve: Serve) -> None:
    api = serve(needs_token=True)
    post, of_tenant = f"{PATH}/pause", bearer(delayed, "admin", tenants=["acme"])
    for headers in (bearer(delayed, "read", "schedule"), of_tenant):
        assert api.post(post, json={}, headers=headers).status_code == 403
    admin = bearer(delayed, "admin")
    for path, body, status in [
        ("/v1/queues/celer/pause", {}, 404),
        (post, {"for": "soon"}, 422),
        (post, {"for": 0}, 422),
        (post, {"length": "2h"}, 422),
    ]:
        assert api.post(path, json=body, headers=admin).status_code == status
    assert delayed.pauses() == []


@pytest.mark.parametrize("path", [f"{PATH}/pause", f"{PATH}/limits/queue/set"])
@pytest.mark.parametrize("length", ["3661d", 0.0001])
def test_a_length_that_is_out_of_range(api: httpx.Client, path: str, length: Any) -> None:
    answer = api.post(path, json={"for": length})
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == "for"
    assert error["detail"].startswith(f"{length!r} is not a length of time from 1ms to 3660d")


def test_the_page(visitor: Visitor, delayed: Delayed) -> None:
    form = visitor.get("/backlog?queue=celery").form("/backlog/pause")
    data = sent(form, verb="pause", why="<b>down</b>", **{"for": "2h"})
    page = visitor.post(form.action, data)
    assert "celery is paused since" in page.text
    assert "<b>down</b>" in page.text
    assert "celery is paused." in visitor.get("/").text
    form = visitor.get("/backlog?queue=celery").form("/backlog/pause")
    assert "is paused since" not in visitor.post(form.action, sent(form, verb="resume")).text
    assert delayed.pauses() == []
    visitor.post("/backlog/pause", {**data, "for": "soon"}, 422)


def test_a_body_that_nobody_reads_is_refused(api: httpx.Client, delayed: Delayed) -> None:
    """Naming the tenant to resume in the wrong place does not resume the whole queue."""
    for part in ({}, {"tenant": "a"}):
        assert api.post(f"{PATH}/pause", json=part).status_code == 200
    answer = api.post(f"{PATH}/resume", json={"tenant": "a"})
    assert answer.status_code == 422
    assert answer.json()["detail"] == (
        "this operation takes no body; its parameters go into the query: task, tenant"
    )
    assert len(delayed.pauses("celery")) == 2
    assert api.post(f"{PATH}/resume?tenant=a", json={}).status_code == 200
    assert [each.tenant for each in delayed.pauses("celery")] == [None]
