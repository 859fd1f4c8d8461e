"""The two dialects, by the requests of their documentation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from celery_ext import Delayed
from celery_ext.http.api import cursors
from tests.kit.http import Serve, bearer

# Later.

CREATE = {
    "topic": "order",
    "delay": 15,
    "retry": 3,
    "callback": "http://hooks.example.com:8888/",
    "content": "hello",
}


def test_later(api: httpx.Client, delayed: Delayed) -> None:
    made = api.post("/create", content=json.dumps(CREATE))
    assert (made.status_code, list(made.json())) == (200, ["id"]), made.text
    id = made.json()["id"]
    found = api.post("/query", content=json.dumps({"id": id})).json()
    created, now = found.pop("creat_time"), time.time()
    assert found.pop("execute_time") - created in (15, 16)
    assert now - 20 < created <= now
    expected = {"id": id, "topic": "order", "max_retry": 3, "has_retry": 0, "content": "hello"}
    assert found == {**expected, "callback": CREATE["callback"]}
    deleted = api.post("/delete", content=json.dumps({"id": id}))
    assert deleted.status_code == 200
    assert [*delayed.find()] == []
    for path in ("/query", "/delete"):
        assert api.post(path, content=json.dumps({"id": id})).status_code == 404


@pytest.mark.parametrize(("given", "kept"), [(31, 31), (10**9, 10**9), (-1, 0)])
def test_later_retries(api: httpx.Client, given: int, kept: int) -> None:
    id = api.post("/create", json={**CREATE, "Retry": given, "retry": given}).json()["id"]
    assert api.post("/query", json={"ID": id}).json()["max_retry"] == kept


def test_later_deletes_what_is_ready(api: httpx.Client) -> None:
    id = api.post("/create", json={**CREATE, "delay": 0}).json()["id"]
    assert api.post("/query", json={"id": id}).status_code == 200
    assert api.post("/delete", json={"id": id}).status_code == 200
    assert api.post("/query", json={"id": id}).status_code == 404


def test_later_calls_this_machine_if_allowed(api: httpx.Client, serve: Serve) -> None:
    local = {**CREATE, "callback": "http://127.0.0.1:8888/"}
    refused = api.post("/create", json=local)
    assert refused.status_code == 400
    assert "add '127.0.0.1:8888' to callback_allow" in refused.json()["detail"]
    allowing = serve(callback_allow=["127.0.0.1:8888"])
    assert allowing.post("/create", json=local).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/create", "{"),
        ("/create", {}),
        ("/create", {**CREATE, "delay": -1}),
        ("/create", {**CREATE, "callback": "http://127.0.0.1:8888/"}),
        ("/query", {}),
        ("/delete", {"id": ""}),
    ],
)
def test_later_what_is_wrong(api: httpx.Client, path: str, body: Any) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    assert api.post(path, content=content).status_code == 400


def test_later_knows_http_jobs_only(api: httpx.Client, delayed: Delayed) -> None:
    delayed.app.send_task("till.charge", task_id="a", countdown=60)
    for path in ("/query", "/delete"):
        assert api.post(path, json={"id": "a"}).status_code == 404
    assert len([*delayed.find()]) == 1


# delayedqueue.

PATH = "/v1/delayedqueue"
PAYLOAD = {"topics": "mail", "callbackFuncName": "send", "args": ["ada"]}
TASK = {"id": 1, "namespace": "default", "delay": "5s", "score": 10, "payload": PAYLOAD}


def send(api: httpx.Client, method: str, path: str = PATH, **body: Any) -> httpx.Response:
    return api.request(method, path, content=json.dumps(body))


def poll(api: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    given = {"topics": "mail", "wait": "0s", **query}
    answer = api.get(f"{PATH}/poll", params=given)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["tasks"])


def status(api: httpx.Client, id: Any = 1, namespace: str = "default") -> Any:
    answer = send(api, "GET", f"{PATH}/status", id=id, namespace=namespace)
    return answer.json() if answer.status_code == 200 else answer.status_code


def test_delayedqueue(api: httpx.Client, delayed: Delayed) -> None:
    assert send(api, "PUT", **TASK).json() == {"id": "1"}
    found = status(api)
    assert 0 < float(found.pop("delay")[:-1]) <= 5
    assert found == {
        **{"id": "1", "namespace": "default", "status": "scheduled", "score": 10},
        "payload": PAYLOAD,
    }
    assert api.get(f"{PATH}/status", params={"id": "1"}).json()["status"] == "scheduled"
    changed = send(api, "POST", id=1, namespace="default", delay="15s", score=3, payload=PAYLOAD)
    assert changed.status_code == 200
    assert 5 < float(status(api)["delay"][:-1]) <= 15
    assert status(api)["score"] == 3
    assert send(api, "PUT", **{**TASK, "delay": "1h"}).status_code == 200
    assert len([*delayed.find()]) == 1
    assert status(api, namespace="other") == 404
    assert send(api, "DELETE", id=1, namespace="default").status_code == 200
    assert status(api)["status"] == "cancelled"
    for method in ("DELETE", "POST"):
        assert send(api, method, id=1, namespace="default").status_code == 404


def test_poll_and_ack(api: httpx.Client, delayed: Delayed) -> None:
    for n, score in enumerate((5, 1, 3)):
        send(api, "PUT", **{**TASK, "id": n, "delay": "0s", "score": score})
    send(api, "PUT", **{**TASK, "id": "x", "delay": 0, "payload": {**PAYLOAD, "topics": "sms"}})
    assert poll(api, namespace="other") == []
    found = poll(api, max=9)
    assert {each["id"] for each in found} == {"0", "1", "2"}
    assert found[0]["payload"]["callbackFuncName"] == "send"
    assert poll(api, max=9) == []
    assert status(api, 0)["status"] == "running"
    acks = [each["ack"] for each in found]
    assert send(api, "POST", f"{PATH}/ack", acks=acks).json() == {"acked": 3}
    assert send(api, "POST", f"{PATH}/ack", acks=acks).status_code == 409
    assert send(api, "POST", f"{PATH}/ack", acks=["x"]).status_code == 422
    assert status(api, 0)["status"] == "done"
    assert [each["id"] for each in poll(api, topics="a,sms")] == ["x"]
    assert [each.unacked for each in delayed.consumers("http.default.mail")] == []


def test_acks_are_of_what_was_polled(api: httpx.Client, delayed: Delayed) -> None:
    """A forged value of `poll` cannot drop a task that a worker holds."""
    for queue, worker in (("celery", "w@host:1:x"), ("http.default.mail", "w@host:1:x")):
        delayed.app.send_task("till.charge", task_id="a", queue=queue)
        assert delayed.store.deliver(queue, worker, 1, 1, lease_ms=60_000) is not None
    polled = f"http:1:{'0' * 32}"
    for held in (
        ("celery", "w@host:1:x", 1),
        ("http.default.mail", "w@host:1:x", 1),
        ("celery", polled, 1),
        ("http.x.\ud800", polled, 1),
    ):
        answer = send(api, "POST", f"{PATH}/ack", acks=[cursors.write(*held)])
        assert answer.status_code == 422, held
    assert [each.unacked for each in delayed.consumers()] == [1, 1]


def test_tasks_of_celery_in_such_a_queue(api: httpx.Client, delayed: Delayed) -> None:
    send(api, "PUT", **{**TASK, "delay": "1h"})
    delayed.app.send_task("till.charge", task_id="c", queue="http.default.mail", countdown=60)
    assert send(api, "POST", id="c", delay="1h").status_code == 404
    assert send(api, "DELETE", id="c").status_code == 404
    assert delayed.get("c") is not None


def test_a_lease_that_ends(api: httpx.Client) -> None:
    send(api, "PUT", **{**TASK, "delay": 0})
    [first] = poll(api, lease=0.05)
    [second] = poll(api, wait="20s", lease="60s")  # a long poll
    assert (first["id"], second["id"]) == ("1", "1")
    assert send(api, "POST", f"{PATH}/ack", acks=[first["ack"]]).status_code == 409
    assert send(api, "POST", f"{PATH}/ack", acks=[second["ack"]]).json() == {"acked": 1}


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("PUT", {}),
        ("PUT", {**TASK, "delay": "soon"}),
        ("PUT", {**TASK, "payload": {"topics": ["x"]}}),
        ("PUT", {**TASK, "payload": {"topics": "a,b"}}),
        ("PUT", {**TASK, "payload": {"topics": "\ud800"}}),
        ("PUT", {**TASK, "score": 2**51 + 1}),
        ("PUT", {**TASK, "payload": {**PAYLOAD, "args": [{"__type__": "x", "__value__": 1}]}}),
        ("POST", {"id": 1, "delay": "x"}),
    ],
)
def test_delayedqueue_what_is_wrong(api: httpx.Client, method: str, body: Any) -> None:
    assert send(api, method, **body).status_code == 422


def test_queues_of_tokens(locked_api: httpx.Client, delayed: Delayed) -> None:
    def call(**bounds: Any) -> Callable[..., int]:
        headers = bearer(delayed, "read", "schedule", **bounds)
        return lambda method, path, **more: (
            locked_api.request(method, path, headers=headers, **more).status_code
        )

    mine, other = (call(queues=[f"http.default.{topic}"]) for topic in ("mail", "sms"))
    tenant = call(tenants=["ada"])
    assert mine("PUT", PATH, json={**TASK, "delay": 0}) == 201
    assert other("PUT", PATH, json=TASK) == 403
    query = {"params": {"topics": "mail", "wait": 0}}
    for who in (other, tenant):
        assert who("GET", f"{PATH}/poll", **query) == 403
        assert who("GET", f"{PATH}/status", params={"id": 1}) == 404
        assert who("DELETE", PATH, json={"id": 1}) == 404
    assert mine("GET", f"{PATH}/poll", **query) == 200
