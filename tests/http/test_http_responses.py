from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import redis
from celery import Celery

from celery_ext import Delayed, expect
from tests.kit.http import Serve, bearer
from tests.kit.questions import answer_in


def given(client: redis.Redis) -> list[str | None]:
    """The answers in the messages of the ready list."""
    return [answer_in(text) for text in client.lrange("celery", 0, -1)]


def test_accepted_early_and_late(api: httpx.Client, app: Celery, client: redis.Redis) -> None:
    expect("k", app=app)
    first = api.post("/v1/responses/k", json={"payload": {"paid": True}, "id": "one"})
    assert (first.status_code, first.json()) == (200, {"key": "k", "outcome": "accepted"})
    assert given(client) == ['{"payload": {"paid": true}}']
    again = api.post("/v1/responses/k", json={"payload": {"paid": True}, "id": "one"})
    assert again.status_code == 200
    late = api.post("/v1/responses/k", json={"payload": None})
    assert late.status_code == 409
    assert "first" in late.json()["detail"]
    early = api.post("/v1/responses/l", json={"error": "no money"})
    assert (early.status_code, early.json()) == (202, {"key": "l", "outcome": "early"})
    assert expect("l", app=app).state == "failed"


@pytest.mark.parametrize("key", ["a b", "order/17", "%2F", "ü", "a?b#c", "x" * 1000])
def test_any_key(api: httpx.Client, app: Celery, delayed: Delayed, key: str) -> None:
    expect(key, app=app)
    path = "/v1/responses/" + httpx.URL("http://x", params={"k": key}).query[2:].decode()
    found = api.post(path.replace("+", "%20"), json={"payload": 1})
    assert found.json() == {"key": key, "outcome": "accepted"}
    info = delayed.expectations.get(key)
    assert info is not None
    assert info.state == "answered"
    long = api.post(f"/v1/responses/{'x' * 1001}", json={"payload": 1})
    assert (long.status_code, long.json()["errors"][0]["field"]) == (422, "key")


@pytest.mark.parametrize("path", ["/v1/responses/k%0A", "/v1/responses/k%0A%0A"])
def test_a_line_feed_is_part_of_a_key(
    api: httpx.Client, app: Celery, delayed: Delayed, path: str
) -> None:
    expect("k", app=app)
    assert api.post(path, json={"payload": 1}).status_code == 404
    info = delayed.expectations.get("k")
    assert info is not None
    assert info.state == "open"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "payload"),
        ({"payload": 1, "error": "x"}, "payload"),
        ({"payload": 1, "id": "with space"}, "id"),
        ({"payload": {"__type__": "uuid", "__value__": {"hex": "0" * 32}}}, "payload"),
        ({"payload": {"__type__": "uuid", "__value__": {"hex": "x"}}}, "payload"),
        ({"payload": json.loads("[" * 102 + "]" * 102)}, "payload"),
    ],
)
def test_what_is_no_answer(api: httpx.Client, body: Any, field: str, delayed: Delayed) -> None:
    found = api.post("/v1/responses/k", json=body)
    assert found.status_code == 422, found.text
    assert found.json()["errors"][0]["field"] == field
    assert delayed.expectations.get("k") is None


def test_options(serve: Serve, app: Celery) -> None:
    app.conf.delayed_expectations = {"early_limit": 1, "answer_bytes": 100}
    api = serve()
    assert api.post("/v1/responses/a", json={"payload": 1}).status_code == 202
    full = api.post("/v1/responses/b", json={"payload": 1})
    assert (full.status_code, full.headers["retry-after"]) == (503, "60")
    for field in ("payload", "error"):
        large = api.post("/v1/responses/b", json={field: "x" * 100})
        assert (large.status_code, large.json()["errors"][0]["field"]) == (422, field)
    app.conf.delayed_expectations = {"early_seconds": 0}
    assert api.post("/v1/responses/c", json={"payload": 1}).status_code == 404


def test_tokens_are_bound(locked_api: httpx.Client, app: Celery, delayed: Delayed) -> None:
    expect("k", app=app, tenant="ada")

    def answer(body: Any, **bounds: Any) -> int:
        headers = bearer(delayed, "schedule", **bounds)
        return locked_api.post("/v1/responses/k", json=body, headers=headers).status_code

    assert answer({"payload": 1}, queues=["mail"]) == 403
    assert answer({"payload": 1, "tenant": "ada"}, tenants=["eve"]) == 403
    assert answer({"payload": 1}, tenants=["ada", "eve"]) == 403
    assert answer({"payload": 1}, tenants=["eve"]) == 202, "of her own key"
    assert answer({"payload": 1}, queues=["celery"]) == 202, "of nobody's"
    info = delayed.expectations.get("k", "ada")
    assert info is not None
    assert info.state == "open"
    assert answer({"payload": 1}, tenants=["ada"], queues=["celery"]) == 200
