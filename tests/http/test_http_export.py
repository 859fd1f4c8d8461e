"""`GET /v1/bulk`: delayed tasks as NDJSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx
import pytest
from redis.exceptions import ConnectionError

from celery_ext import Delayed
from celery_ext.http.api.endpoints import export
from celery_ext.http.auth.tokens import Tokens
from tests.kit.wait import wait_until


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "STEP", 3)


@pytest.fixture
def filled(api: httpx.Client) -> httpx.Client:
    lines = [
        {"task": task, "id": f"{queue}-{n}", "queue": queue, "delay": f"{n + 1}h", "tenant": tenant}
        for queue, task, tenant in (("a", "till.send_mail", "ada"), ("b", "till.charge", "bob"))
        for n in range(5)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    answer = api.post("/v1/bulk", content=content, headers={"content-type": "application/x-ndjson"})
    assert answer.headers["delayed-accepted"] == "10"
    api.api.service.forget_names()  # type: ignore[attr-defined]
    return api


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


ALL = [f"{queue}-{n}" for queue in "ab" for n in range(5)]


def test_all(filled: httpx.Client) -> None:
    lines = lines_of(filled.get("/v1/bulk"))
    assert [line["id"] for line in lines if "id" in line] == ALL
    cursors = [line["cursor"] for line in lines if "cursor" in line]
    assert cursors[-1] is None
    assert all(cursors[:-1])
    assert lines[-1] == {"cursor": None}
    assert lines[0]["task"] == "till.send_mail"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"queue": "b"}, ALL[5:]),
        ({"task": "*mail"}, ALL[:5]),
        ({"tenant": "bob"}, ALL[5:]),
        ({"tenant": "eve"}, []),
    ],
)
def test_some(filled: httpx.Client, given: dict[str, str], expected: list[str]) -> None:
    lines = lines_of(filled.get("/v1/bulk", params=given))
    assert [line["id"] for line in lines if "id" in line] == expected
    assert lines[-1] == {"cursor": None}


def test_each_cursor_goes_on_where_it_is(filled: httpx.Client) -> None:
    lines, seen = lines_of(filled.get("/v1/bulk")), 0
    for line in lines[:-1]:
        if "id" in line:
            seen += 1
            continue
        rest = lines_of(filled.get("/v1/bulk", params={"cursor": line["cursor"]}))
        assert [each["id"] for each in rest if "id" in each] == ALL[seen:]


def test_wrong_queries(filled: httpx.Client) -> None:
    for given in ({"cursor": "x"}, {"limit": "5"}, {"due_after": "soon"}):
        assert filled.get("/v1/bulk", params=given).status_code == 422, given


def test_what_is_another_tenants(
    filled: httpx.Client, locked_api: httpx.Client, delayed: Delayed
) -> None:
    token = Tokens(delayed).create("test", ["read"], tenants=["ada"])[1]
    answer = locked_api.get("/v1/bulk", headers={"authorization": f"Bearer {token}"})
    assert [line["id"] for line in lines_of(answer) if "id" in line] == ALL[:5]
    token = Tokens(delayed).create("test", ["schedule"])[1]
    answer = locked_api.get("/v1/bulk", headers={"authorization": f"Bearer {token}"})
    assert answer.status_code == 403


def test_a_broker_that_fails_meanwhile(
    filled: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line tells where to go on."""
    page_of, calls = export.page_of, []

    def fail_later(*given: Any) -> dict[str, Any]:
        calls.append(given)
        if len(calls) == 3:
            raise ConnectionError("gone")
        return page_of(*given)

    monkeypatch.setattr(export, "page_of", fail_later)
    lines = lines_of(filled.get("/v1/bulk"))
    assert lines[-1]["problem"]["status"] == 503
    monkeypatch.setattr(export, "page_of", page_of)
    rest = lines_of(filled.get("/v1/bulk", params={"cursor": lines[-1]["cursor"]}))
    assert [line["id"] for line in [*lines, *rest] if "id" in line] == ALL


def test_streams_are_bounded(filled: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    service = filled.api.service  # type: ignore[attr-defined]
    monkeypatch.setattr(service, "_streams", Counter(all=service.options.streams))
    assert filled.get("/v1/bulk").status_code == 503
    monkeypatch.setattr(service, "_streams", Counter())
    lines_of(filled.get("/v1/bulk"))
    wait_until(lambda: not service._streams, "it gives its place back")
