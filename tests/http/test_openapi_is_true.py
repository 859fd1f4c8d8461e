"""The OpenAPI document describes the dialects as they behave."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from celery_ext.http.api.openapi import document
from celery_ext.http.app import OPERATIONS


@pytest.mark.parametrize("name", ["/v1/delayedqueue", "/delete"])
def test_text_may_be_a_number(api: httpx.Client, name: str) -> None:
    body = document(OPERATIONS)["paths"][name]["delete" if "queue" in name else "post"]
    schema: Any = body["requestBody"]["content"]["application/json"]["schema"]
    found = document(OPERATIONS)["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert [each["type"] for each in found["properties"]["id"]["anyOf"]] == ["string", "number"]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"id": 7, "namespace": 1.5}, 201),
        ({"id": True}, 422),
        ({"id": 1e30}, 422),
        ({"id": "a", "score": False}, 422),
        ({"id": "a", "score": -7}, 201),
    ],
)
def test_numbers_and_what_is_none(api: httpx.Client, given: dict[str, Any], status: int) -> None:
    answer = api.put("/v1/delayedqueue", json={"payload": None, "delay": "1h", **given})
    assert answer.status_code == status, answer.text


def test_deleted_is_an_empty_object(api: httpx.Client) -> None:
    answers = document(OPERATIONS)["paths"]["/delete"]["post"]["responses"]
    schema = answers["200"]["content"]["application/json"]["schema"]
    assert schema["$ref"].endswith("/LaterDeleted")
    job = {"topic": "order", "delay": 3600, "callback": "https://example.com/", "content": "x"}
    id = api.post("/create", json=job).json()["id"]
    assert api.post("/delete", json={"id": id}).json() == {}


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/queues/q/limits/l/reset", "POST"),
        ("/v1/queues/q/limits/l/set", "POST"),
        ("/v1/queues/q/limits/l", "GET"),
        ("/v1/tasks/a", "DELETE, GET, PATCH, PUT"),
    ],
)
def test_methods_of_a_path(api: httpx.Client, path: str, methods: str) -> None:
    answer = api.request("TRACE", path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


def test_lengths_of_time_are_bounded(api: httpx.Client) -> None:
    for delay, status in (("1000.000s1000.000s", 201), ("00000.000ms0000.000ms", 422)):
        answer = api.post("/v1/tasks", json={"task": "till.charge", "delay": delay})
        assert answer.status_code == status, answer.text
