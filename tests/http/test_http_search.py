"""Searches by arguments, run time and worker: in Python, over HTTP and on the pages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from celery import Celery

from celery_ext import Delayed, Query
from celery_ext.errors import QueryError
from celery_ext.http.api import cursors
from celery_ext.http.api.endpoints.lists import by_state, search
from kombu_delayed.store.outcomes.records import Kept, Note, Outcomes
from tests.http.test_pages_lists import listed
from tests.kit.http import all_rows, bury, pages
from tests.kit.pages import Visitor

SEVEN = "args.customer_id == 7"


@pytest.fixture
def orders(app: Celery) -> None:
    """Delayed and ready orders of customers 0 to 9, each for two mails."""
    for n in range(20):
        customer = {"customer_id": n % 10, "to": [f"c{n}@example.org"]}
        app.send_task("till.charge", (n,), customer, task_id=f"d{n}", countdown=900 + n)
        app.send_task("till.charge", (n,), customer, task_id=f"r{n}")


@pytest.fixture
def outcomes(delayed: Delayed) -> None:
    """Tasks that have run for 1, 2, … seconds on two workers, and one that runs for an hour."""
    head, now = '["t","till.charge",null]\n', int(time.time() * 1000)

    def lines(n: int) -> str:
        failed = f'["-",{now + n},0,{{"error":"ValueError","run_ms":{n * 1000}}}]\n'
        return f'["s",{now - 9_000},0,"web{n % 2}:1:a",7]\n{failed}'

    notes = [Note(f"f{n}", "-", now + n, True, head, lines(n)) for n in range(1, 6)]
    begun = f'["s",{now - 3_600_000},0,"web1:1:a",7]\n'
    notes.append(Note("long", "s", now - 3_600_000, False, head, begun))
    calls = Outcomes(delayed.store).note_calls("celery", notes, Kept(100, 60_000_000), "web1:1:a")
    delayed.store.all_of(calls)


def test_arguments_in_python(delayed: Delayed, orders: None) -> None:
    def ids(**criteria: Any) -> list[str]:
        return sorted(info.id for info in delayed.find(**criteria))

    assert ids(where=SEVEN) == ["d17", "d7"]
    assert ids(where=SEVEN, state="ready") == ["r17", "r7"]
    assert ids(where=f"{SEVEN} and args.0 > 7") == ["d17"]
    assert ids(where="args.to ~ c1?@*", task="till.ch*") == [f"d{n}" for n in range(10, 20)]
    assert ids(where="args contains c3@example") == ["d3"]
    looked_at: list[int] = []
    assert len([*delayed.find(where=SEVEN, progress=looked_at.append)]) == 2
    assert sum(looked_at) == 20
    query = next(iter(delayed.find(where=SEVEN))).id
    assert query == "d7"
    with pytest.raises(QueryError, match="not a condition"):
        delayed.find(where="customer 7")


def test_bulk_changes_by_arguments(delayed: Delayed, orders: None) -> None:
    query = Query(where=SEVEN)
    assert not query.is_empty
    assert delayed.count(query) == 2
    assert delayed.cancel_many(query).changed == 2
    assert delayed.count(Query()) == 18
    assert delayed.cancel_many(Query(where=SEVEN, state="ready")).changed == 2
    assert delayed.count(Query(state="ready")) == 18


def test_run_times_and_workers_in_python(delayed: Delayed, outcomes: None) -> None:
    def ids(of: str = "failed", **criteria: Any) -> list[str]:
        return sorted(each.id for each in delayed.recorded(of, **criteria))

    assert ids(longer_than=3) == ["f4", "f5"]
    assert ids(shorter_than="2500ms") == ["f1", "f2"]
    assert ids(longer_than="1s", shorter_than="5s", worker="web1") == ["f3"]
    assert ids("running", longer_than="50m") == ["long"]
    assert ids("running", longer_than="70m") == []
    assert ids("slow", worker="web0") == ["f2", "f4"]
    with pytest.raises(QueryError, match="longer_than='soon' is not a length"):
        delayed.recorded(longer_than="soon")


def test_over_http(
    api: httpx.Client, delayed: Delayed, orders: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ids(**query: Any) -> list[str]:
        return sorted(task["id"] for task in all_rows(api, "/v1/tasks", "tasks", **query))

    assert ids(where=SEVEN) == ["d17", "d7"]
    assert ids(where=SEVEN, state="ready", limit=1) == ["r17", "r7"]
    answer = api.get("/v1/tasks", params={"where": "customer 7"})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "where")
    exported = api.get("/v1/bulk", params={"where": SEVEN}).text
    assert exported.count('"id"') == 2
    monkeypatch.setattr(search, "LOOKED_AT", 25)  # arguments of five are decoded
    assert len(pages(api, "/v1/tasks", "tasks", where=SEVEN)) > 3
    monkeypatch.undo()
    for module in (search, by_state):  # each request is late at once
        monkeypatch.setattr(module, "SEARCH_SECONDS", 0)
    assert ids(where=SEVEN) == ["d17", "d7"]
    assert ids(where=SEVEN, state="ready") == ["r17", "r7"]
    for state in ("scheduled", "ready"):
        assert len(pages(api, "/v1/tasks", "tasks", where=SEVEN, state=state)) >= 20
    monkeypatch.undo()
    preview = {"where": SEVEN, "dry_run": True}
    assert api.post("/v1/bulk/cancel", json=preview).json()["matched"] == 2
    for state in ("scheduled", "ready"):
        done = api.post("/v1/bulk/cancel", json={"where": SEVEN, "state": state}).json()
        assert (done["changed"], len(done["sample"])) == (2, 2)
        assert ids(where=SEVEN, state=state) == []
    bury(delayed)
    assert ids(where="args.customer_id == 6", state="dead") == ["r16", "r6"]


@pytest.mark.parametrize("looked_at", [1, 5_000])
def test_a_list_that_changes_between_its_pages(
    looked_at: int,
    api: httpx.Client,
    delayed: Delayed,
    outcomes: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each failed task is on a page, although those on the pages before are sent again."""
    monkeypatch.setattr(by_state, "RECORDS", looked_at)
    found, given = [], {"state": "failed", "limit": "2"}
    while True:
        page = api.get("/v1/tasks", params=given).json()
        ids = [task["id"] for task in page["tasks"]]
        found += ids
        again = [Note(id, "r", 1, False, "[]\n", '["r",1,1,"web1:1:a"]\n') for id in ids]
        calls = Outcomes(delayed.store).note_calls("celery", again, Kept(100, 60_000_000))
        delayed.store.all_of(calls)
        if page["next"] is None:
            break
        given["cursor"] = page["next"]
    assert found == ["f5", "f4", "f3", "f2", "f1"]
    for name in ("failed", "slow ", "failed-ids f1"):
        cursor = cursors.write("celery", 3, name)
        answer = api.get("/v1/tasks", params={"state": "failed", "cursor": cursor})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "cursor")


def test_run_times_and_workers_over_http(api: httpx.Client, outcomes: None) -> None:
    def ids(state: str, **query: Any) -> list[str]:
        found = all_rows(api, "/v1/tasks", "tasks", state=state, **query)
        return sorted(task["id"] for task in found)

    assert ids("failed", longer_than="3s") == ["f4", "f5"]
    assert ids("failed", shorter_than=3, worker="web?") == ["f1", "f2"]
    assert ids("slow", worker="web0", longer_than="3s") == ["f4"]
    assert ids("running", longer_than="50m") == ["long"]
    for wrong in (
        {"longer_than": "3s"},
        {"state": "ready", "worker": "web0"},
        {"state": "failed", "where": SEVEN},
        {"state": "failed", "longer_than": "soon"},
    ):
        assert api.get("/v1/tasks", params=wrong).status_code == 422


def test_arguments_on_the_page(visitor: Visitor, orders: None) -> None:
    assert listed(visitor, f"/backlog?where={SEVEN}") == ["d7", "d17"]
    assert sorted(listed(visitor, f"/backlog?state=ready&where={SEVEN}")) == ["r17", "r7"]
    page = visitor.get(f"/backlog?where={SEVEN}")
    assert page.form("/backlog/preview").values("where") == [SEVEN]
    wrong = visitor.get("/backlog?where=customer+7", 422)
    assert "is not a condition" in wrong.text
    preview = visitor.post(
        "/backlog/preview",
        {"csrf": visitor.csrf(), "where": SEVEN, "all": "1", "verb": "cancel"},
    )
    assert "2 tasks" in preview.text


def test_run_times_and_workers_on_the_page(visitor: Visitor, outcomes: None) -> None:
    def ids(path: str) -> Iterator[str]:
        page = visitor.get(path)
        return (f"f{n}" for n in range(1, 6) if f"/task?id=f{n}&" in page.html)

    assert [*ids("/failures?longer_than=3s")] == ["f4", "f5"]
    assert [*ids("/failures?worker=web0")] == ["f2", "f4"]
    visitor.get("/failures?longer_than=soon", 422)
