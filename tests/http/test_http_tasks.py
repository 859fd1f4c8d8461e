from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import httpx
import pytest
import redis
from celery import Celery

from celery_ext import Delayed, UniqueTask
from celery_ext.http.api import cursors, ready, status
from celery_ext.http.api.task_models import NewTask
from celery_ext.http.service.create_once import digest_of
from celery_ext.policies.of_message import policies_in
from celery_ext.tasks.body import read_body
from kombu_delayed.connection.connection import ServerConnection
from kombu_delayed.inspection.ready import index as ready_index
from kombu_delayed.message.envelope import open_envelope
from kombu_delayed.store.outcomes.records import Kept, Note, Outcomes
from kombu_delayed.testing import dump
from tests.kit.http import Serve, all_rows, bury, pages
from tests.kit.outcomes import WORKER, note
from tests.kit.state import all_keys

MAIL = {"task": "till.send_mail", "delay": "1h"}

#: Kombu's JSON decodes this as another object.
TYPED = {"__type__": "datetime", "__value__": "2030-01-01T00:00:00"}


def body(delayed: Delayed, id: str) -> Any:
    info = delayed.get(id)
    assert info is not None
    return read_body(delayed.app, info)


def test_a_ready_task_among_many(
    api: httpx.Client, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "READING_LIMIT", 2)
    for n in range(9):
        api.post("/v1/tasks", json={"task": "till.charge", "id": f"ready-{n}", "args": [n]})
    for n in range(9):
        found = api.get(f"/v1/tasks/ready-{n}").json()
        assert (found["status"], found["args"]) == ("waiting", f"[{n}]")
    assert api.get("/v1/tasks/nobody").status_code == 404
    delayed.cancel("ready-4")
    assert api.get("/v1/tasks/ready-4").json()["status"] != "waiting"
    assert api.get("/v1/tasks/ready-3").json()["status"] == "waiting"


def test_a_delayed_task_among_many_queues(
    api: httpx.Client, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All queues are asked in one go."""
    for n in range(60):
        delayed.app.send_task("till.charge", queue=f"q{n}", countdown=3600)
    for _ in range(2):
        api.post("/v1/tasks", json={**MAIL, "id": "one", "queue": "q30"})
    assert status.with_id(delayed.store, [*delayed.queues()], "one") == {"q30"}
    calls, run = list[Any](), ServerConnection.insist

    def counted(*command: Any, **more: Any) -> Any:
        calls.append(command)
        return run(*command, **more)

    monkeypatch.setattr(ServerConnection, "insist", counted)
    assert api.put("/v1/tasks/one", json=MAIL).status_code == 200
    assert api.put("/v1/tasks/two", json=MAIL).status_code == 201
    assert len(calls) < 60


def test_policies_of_a_task(api: httpx.Client, delayed: Delayed) -> None:
    given = [{"Timeout": {"after": "1h"}}, {"Window": {"ranges": ["00:00-24:00"], "tz": "UTC"}}]
    made = api.post("/v1/tasks", json={**MAIL, "policies": given})
    assert made.status_code == 201, made.text
    info = delayed.get(made.json()["id"])
    assert info is not None
    assert [*map(repr, policies_in(info.headers))] == [
        "Timeout('1h', then='bury')",
        "Window('00:00-24:00', tz='UTC', days='mon-sun')",
    ]


@pytest.mark.parametrize(
    ("policies", "why"),
    [
        ([{"LimitUse": {"critical": True}}], "LimitUse is for programs"),
        ([{"Limit": {"concurrency": 1}}], "and not Limit"),
        ([{"Sooner": {}}], "no policy 'Sooner'"),
        ([{"Window": {"ranges": 5}}], "Window"),
        ([{"Timeout": {"after": {"x": 1}}}], "Timeout"),
        ([{"Timeout": {"after": "1h", "soft": [[]]}}], "soft"),
        ([{"Backoff": {"seconds": {"__type__": "datetime", "__value__": "x"}}}], "__type__"),
        ([{"Backoff": {"seconds": [10] * 3, "retries": "x"}}], "retries"),
        ([{"own": ["shop:Own", "Own()"]}], "valid dictionary"),
        ([{"own": []}], "policies"),
        ([{"own": {}}], "policies"),
        ([{"Timeout": {}, "Window": {}}], "a kind with its arguments"),
        ([{"Window": {"except_dates": ["x"], "ranges": ["00:00-24:00"]}}], "2026-12-24"),
        ([{"Timeout": 5}], "policies"),
        ([{"Backoff": {"seconds": [1] * 3000}}], "at most 4,000"),
    ],
)
def test_policies_that_cannot_be(api: httpx.Client, policies: Any, why: str) -> None:
    answer = api.post("/v1/tasks", json={**MAIL, "policies": policies})
    assert answer.status_code == 422, answer.text
    assert why in answer.text


def test_create(api: httpx.Client, delayed: Delayed) -> None:
    given = {
        "task": "till.send_mail",
        "args": ["ada", 1],
        "kwargs": {"html": True},
        "due": "2100-01-31T09:00:00+01:00",
        "queue": "mail",
        "priority": 7,
        "tenant": "ada",
        "headers": {"campaign": 3},
        "expires": "2100-02-01T00:00:00",
    }
    made = api.post("/v1/tasks", json=given)
    assert made.status_code == 201, made.text
    found = made.json()
    assert found["status"] == "scheduled"
    assert found["due"] == "2100-01-31T08:00:00+00:00"
    assert made.headers["location"] == f"/v1/tasks/{found['id']}"
    info = delayed.get(found["id"])
    assert info is not None
    assert (info.queue, info.priority, info.tenant) == ("mail", 7, "ada")
    assert info.headers["campaign"] == 3
    assert info.headers["expires"] == "2100-02-01T00:00:00+00:00"
    assert [*body(delayed, found["id"])][:2] == [["ada", 1], {"html": True}]


@pytest.mark.parametrize(
    ("times", "status", "seconds"),
    [
        ({"delay": "15s"}, "scheduled", 15),
        ({"delay": "1h30m"}, "scheduled", 5_400),
        ({"delay": 20.5}, "scheduled", 20.5),
        ({"due": "2001-01-01T00:00:00Z"}, "waiting", None),
        ({}, "waiting", None),
    ],
)
def test_times(api: httpx.Client, times: Any, status: str, seconds: float | None) -> None:
    before = datetime.now(timezone.utc) - timedelta(milliseconds=1)  # due times are whole ones
    found = api.post("/v1/tasks", json={"task": "till.charge", **times}).json()
    assert found["status"] == status
    if seconds is not None:
        ahead = (datetime.fromisoformat(found["due"]) - before).total_seconds()
        assert seconds <= ahead < seconds + 20


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"delay": "soon"}, "delay"),
        ({"delay": "-1s"}, "delay"),
        ({"delay": "9999999d"}, "delay"),
        ({"due": "tomorrow"}, "due"),
        ({"due": "2030-01-01", "delay": 1}, "due"),
        ({"priority": 256}, "priority"),
        ({"queue": ""}, "queue"),
        ({"queue": "{mail}:paused"}, "queue"),
        ({"queue": "celery@vm.celery.pidbox"}, "queue"),
        ({"expires": "1"}, "expires"),
        ({"colour": "red"}, "colour"),
        ({"id": "a b"}, "id"),
        ({"headers": {"Task": "other"}}, "headers"),
        ({"headers": {"eta": "2001-01-01"}}, "headers"),
        ({"headers": {"Delayed_queue": "other"}}, "headers"),
        ({"args": [{"__type__": "uuid", "__value__": 1}]}, "args"),
        ({"kwargs": {"a": [TYPED]}}, "kwargs"),
        ({"retry": 1}, "retry"),
        ({"timeout": 5}, "timeout"),
        *(({"task": name}, "task") for name in ("till.unknown", "celery.backend_cleanup")),
        ({"task": "celery_ext.http.post"}, "task"),
    ],
)
def test_wrong_fields(api: httpx.Client, client: redis.Redis, given: Any, field: str) -> None:
    check_refused(api.post("/v1/tasks", json={"task": "till.send_mail", **given}), field)
    assert all_keys(client) == []


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "task"),
        ({"topic": "t"}, "task"),
        ({"topic": "t", "callback": "ftp://example.com/"}, "callback"),
        ({"topic": "t", "callback": "https://example.com/", "args": []}, "args"),
        ({"topic": "t", "callback": "http://a.example/", "content": {"a": TYPED}}, "content"),
        ([], "body"),
    ],
)
def test_neither_task_nor_job(api: httpx.Client, given: Any, field: str) -> None:
    check_refused(api.post("/v1/tasks", json=given), field)


def test_a_server_that_was_not_told_to_takes_no_job(serve: Serve) -> None:
    with_jobs, without = serve(), serve(callbacks=False)
    job = {"topic": "t", "callback": "https://example.com/", "delay": "1h"}
    assert with_jobs.post("/v1/tasks", json=job).status_code == 201
    check_refused(answer := without.post("/v1/tasks", json=job), "callback")
    assert '{"callbacks": True}' in answer.text.replace(chr(92), "")


def check_refused(answer: httpx.Response, field: str) -> None:
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert field in [each["field"] for each in problem["errors"]], problem
    assert problem["status"] == 422


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"task": NaN}', "application/json", 400),
        (b'{"task": "till.charge", "args": [1e400]}', "application/json", 400),
        (b'{"task": "till.charge", "args": [-1e400]}', "application/json", 400),
        (b'{"task": "till.charge", "args": [Infinity]}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (json.dumps(MAIL).encode(), "text/plain", 415),
    ],
)
def test_wrong_bodies(api: httpx.Client, content: bytes, kind: str, status: int) -> None:
    answer = api.post("/v1/tasks", content=content, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    assert answer.json()["status"] == status


def test_put_is_idempotent(api: httpx.Client, delayed: Delayed) -> None:
    first = api.put("/v1/tasks/order-7", json=MAIL)
    again = api.put("/v1/tasks/order-7", json=MAIL)
    assert (first.status_code, again.status_code) == (201, 200)
    assert len([*delayed.find()]) == 1
    assert again.json()["due"] == first.json()["due"]
    other = api.put("/v1/tasks/order-7", json={**MAIL, "args": [2], "due": None, "delay": "2h"})
    assert other.status_code == 200
    assert len([*delayed.find()]) == 1
    assert body(delayed, "order-7")[0] == [2]
    assert api.put("/v1/tasks/order-7", json={"task": "till.charge"}).status_code == 409
    assert api.put("/v1/tasks/order-7", json={**MAIL, "queue": "q"}).status_code == 409
    assert api.put("/v1/tasks/a b", json=MAIL).status_code == 422


def test_put_of_what_is_no_utf_8(api: httpx.Client, delayed: Delayed) -> None:
    headers, kwargs = {"content-type": "application/json"}, {"a": {"\udc00": "\ud800"}}
    for code in (201, 200):
        content = json.dumps({**MAIL, "kwargs": kwargs})
        answer = api.put("/v1/tasks/half", content=content, headers=headers)
        assert answer.status_code == code, answer.text
    assert body(delayed, "half")[1] == kwargs
    assert api.get("/v1/tasks/half").json()["status"] == "scheduled"


def test_digests_of_requests_stay_as_they_are_kept() -> None:
    given = {**MAIL, "args": [1, 2.0, "ü", {"b": None, "a": True}], "priority": 3}
    made = NewTask.model_validate(given).model_dump(exclude_unset=True)
    assert digest_of(made) == "1af9190057a7ea77"


def test_put_after_it_has_run_sends_nothing(api: httpx.Client, delayed: Delayed) -> None:
    assert api.put("/v1/tasks/order-7", json={"task": "till.charge"}).status_code == 201
    again = api.put("/v1/tasks/order-7", json={"task": "till.charge"})
    assert (again.status_code, again.json()["status"]) == (200, "waiting")
    assert delayed.store.deliver("celery", "w1:1:a", 1, 1, lease_ms=30_000)
    delayed.store.ack("celery", "w1:1:a", [1], on_error=lambda: None)
    delayed.store.run.settle()
    again = api.put("/v1/tasks/order-7", json={"task": "till.charge"})
    assert (again.status_code, again.json()["status"]) == (200, "done")
    assert delayed.counts()["celery"].ready == 0


@pytest.mark.parametrize("delay", [None, "1h"])
def test_put_of_a_unique_task_is_idempotent_too(
    app: Celery, serve: Serve, delayed: Delayed, client: redis.Redis, delay: str | None
) -> None:
    """Its key says nothing about tasks that are due."""

    @app.task(name="till.unique", base=UniqueTask, shared=False)
    def unique() -> None: ...

    api, given = serve(), {"task": "till.unique", "delay": delay}
    assert api.put("/v1/tasks/a", json=given).status_code == 201
    delayed.run_now("a")
    assert api.put("/v1/tasks/a", json=given).status_code == 200
    assert delayed.store.deliver("celery", "w1:1:a", 1, 1, lease_ms=30_000)
    delayed.store.ack("celery", "w1:1:a", [1], on_error=lambda: None)
    delayed.store.run.settle()
    again = api.put("/v1/tasks/a", json=given)
    assert (again.status_code, again.json()["status"]) == (200, "done")
    counts = delayed.counts()["celery"]
    assert (counts.delayed, counts.ready, counts.unacked) == (0, 0, 0)
    client.zadd("{celery}:ledgers-until", {"{celery}:job:http:a": 1})  # more than a day later
    assert api.put("/v1/tasks/a", json=given).status_code == 201
    assert api.delete("/v1/tasks/a").status_code == 204
    assert api.put("/v1/tasks/b", json={**given, "delay": "1h"}).status_code == 201
    assert api.delete("/v1/tasks/b").status_code == 204
    assert api.put("/v1/tasks/b", json={**given, "delay": "1h"}).status_code == 201


def test_put_again_leaves_nothing_of_what_was_there(api: httpx.Client, delayed: Delayed) -> None:
    soon, late = (
        (datetime.now(timezone.utc) + timedelta(hours=hours)).isoformat() for hours in (2, 50)
    )
    policies = [{"Timeout": {"after": "1h"}}]
    more = {"headers": {"x": 1, "y": 2}, "policies": policies, "priority": 3, "expires": soon}
    assert api.put("/v1/tasks/a", json={**MAIL, **more}).status_code == 201
    again = {**MAIL, "delay": "40h", "headers": {"y": 3}, "expires": late}
    assert api.put("/v1/tasks/a", json=again).status_code == 200
    info = delayed.get("a")
    assert info is not None
    assert info.headers["expires"] == late
    assert info.headers["y"] == 3
    assert "x" not in info.headers
    assert policies_in(info.headers) == ()
    assert json.loads(info.message)["properties"]["priority"] == 0
    assert api.put("/v1/tasks/a", json=MAIL).status_code == 200
    info = delayed.get("a")
    assert info is not None
    assert info.headers["expires"] is None


def test_put_again_undoes_a_change(api: httpx.Client, delayed: Delayed) -> None:
    given = {**MAIL, "args": [1]}
    assert api.put("/v1/tasks/a", json=given).status_code == 201
    assert api.patch("/v1/tasks/a", json={"args": [2]}).status_code == 200
    assert api.put("/v1/tasks/a", json=given).status_code == 200
    assert body(delayed, "a")[0] == [1]


def test_put_of_an_id_that_another_tenant_has(api: httpx.Client, delayed: Delayed) -> None:
    assert api.put("/v1/tasks/a", json={**MAIL, "tenant": "ada", "args": [1]}).status_code == 201
    for tenant in ({}, {"tenant": "bob"}):
        assert api.put("/v1/tasks/a", json={**MAIL, **tenant}).status_code == 409
    assert body(delayed, "a")[0] == [1]


def test_put_after_a_move_to_another_queue_and_a_delete_creates(
    api: httpx.Client, delayed: Delayed
) -> None:
    assert api.put("/v1/tasks/a", json={**MAIL, "queue": "one"}).status_code == 201
    assert delayed.redirect("a", "celery")
    assert api.delete("/v1/tasks/a").status_code == 204
    assert api.put("/v1/tasks/a", json={**MAIL, "queue": "one"}).status_code == 201


@pytest.mark.parametrize("how", ["put", "patch", "bulk"])
def test_an_id_is_remembered_until_a_day_after_a_later_due_time(
    api: httpx.Client, delayed: Delayed, client: redis.Redis, how: str
) -> None:
    month = timedelta(days=30)
    api.put("/v1/tasks/a", json=MAIL)
    if how == "put":
        api.put("/v1/tasks/a", json={**MAIL, "delay": "30d"})
    elif how == "patch":
        api.patch("/v1/tasks/a", json={"delay": "30d"})
    else:
        api.post("/v1/bulk/reschedule", json={"task": "till.send_mail", "delay": "30d"})
    info = delayed.get("a")
    assert info is not None
    assert info.due_ms is not None
    assert info.due_ms > (time.time() + month.total_seconds() - 60) * 1000
    ((_, until_ms),) = client.zrange("{celery}:ledgers-until", 0, -1, withscores=True)
    assert until_ms - info.due_ms >= 86_400_000


@pytest.mark.parametrize("task", ["till.charge", "till.unique"])
@pytest.mark.parametrize("delay", [None, "1h"])
def test_an_id_is_remembered_until_a_day_after_the_due_time_that_a_policy_chose(
    app: Celery, serve: Serve, delayed: Delayed, client: redis.Redis, delay: str | None, task: str
) -> None:
    @app.task(name="till.unique", base=UniqueTask, shared=False)
    def unique() -> None: ...

    api = serve()
    day = (datetime.now(timezone.utc) + timedelta(days=3)).strftime("%a").lower()
    window = {"Window": {"ranges": ["00:00-24:00"], "tz": "UTC", "days": day}}
    given = {"task": task, "policies": [window], "delay": delay}
    assert api.put("/v1/tasks/a", json=given).status_code == 201
    info = delayed.get("a")
    assert info is not None
    assert info.due_ms is not None
    assert info.due_ms > (time.time() + 86_400) * 1000
    ((_, until_ms),) = client.zrange("{celery}:ledgers-until", 0, -1, withscores=True)
    assert until_ms - info.due_ms >= 86_400_000


def test_a_task_that_is_put_for_now_was_never_due(
    api: httpx.Client, delayed: Delayed, client: redis.Redis
) -> None:
    """Neither policies nor reports on late tasks take it for one of 1970."""
    assert api.put("/v1/tasks/a", json={"task": "till.charge"}).status_code == 201
    (text,) = client.lrange("celery", 0, -1)
    assert "due_ms" not in json.loads(text)
    assert api.get("/v1/tasks/a").json()["due"] is None
    (event,) = (fields for _, fields in client.xrange("{celery}:events"))
    assert b"1970" not in b"".join(event.values())
    assert b'"due' not in b"".join(event.values())


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_what_is_too_deep_for_a_worker(api: httpx.Client, method: str) -> None:
    """Its worker would exit, and then the next one: it cannot pickle the task for its pool."""
    path = "/v1/tasks" if method == "POST" else "/v1/tasks/a"
    for levels, expected in ((100, 201), (101, 422), (500, 422)):
        args = json.loads("[" * levels + "]" * levels)
        answer = api.request(method, path, json={"task": "till.charge", "args": args})
        assert answer.status_code == expected, levels
    assert "at most 100 levels" in answer.text


def test_put_after_a_delete_creates(api: httpx.Client) -> None:
    assert api.put("/v1/tasks/a", json=MAIL).status_code == 201
    assert api.delete("/v1/tasks/a").status_code == 204
    assert api.get("/v1/tasks/a").json()["status"] == "cancelled"
    assert api.delete("/v1/tasks/a").status_code == 409
    assert api.put("/v1/tasks/a", json=MAIL).status_code == 201
    assert api.get("/v1/tasks/a").json()["status"] == "scheduled"


def test_a_delete_of_a_task_that_has_run_keeps_its_id(api: httpx.Client, delayed: Delayed) -> None:
    assert api.put("/v1/tasks/a", json={"task": "till.charge"}).status_code == 201
    assert delayed.store.deliver("celery", "w1:1:a", 1, 1, lease_ms=30_000)
    delayed.store.ack("celery", "w1:1:a", [1], on_error=lambda: None)
    delayed.store.run.settle()
    assert api.delete("/v1/tasks/a").status_code == 409
    assert api.put("/v1/tasks/a", json={"task": "till.charge"}).json()["status"] == "done"


def test_what_a_policy_has_dropped(api: httpx.Client, delayed: Delayed) -> None:
    assert api.put("/v1/tasks/a", json={"task": "till.charge"}).status_code == 201
    assert delayed.store.deliver("celery", "w1:1:a", 1, 1, lease_ms=30_000)
    assert delayed.store.drop("celery", "w1:1:a", 1, "older than 1h")
    found = api.get("/v1/tasks/a").json()
    assert (found["status"], found["reason"]) == ("cancelled", "older than 1h")


def test_puts_of_several_servers_at_once_make_one_task(serve: Serve, delayed: Delayed) -> None:
    servers = [serve(), serve()]
    with ThreadPoolExecutor(8) as threads:
        answers = [
            threads.submit(servers[n % 2].put, "/v1/tasks/a", json={**MAIL, "args": [n]})
            for n in range(24)
        ]
    assert {each.result().status_code for each in answers} == {200, 201}
    assert sum(each.result().status_code == 201 for each in answers) == 1
    assert [info.id for info in delayed.find()] == ["a"]


def test_status(api: httpx.Client, delayed: Delayed, client: redis.Redis) -> None:
    store = delayed.store
    for id in ("a", "b"):
        api.post("/v1/tasks", json={"task": "till.charge", "id": id})
    found = api.get("/v1/tasks/a").json()
    assert (found["status"], found["waiting_for"]) == ("waiting", "worker")
    store.deliver("celery", "w:1:x", 2, 1, lease_ms=60_000)
    found = api.get("/v1/tasks/a").json()
    assert (found["status"], found["consumer"]) == ("running", "w:1:x")
    store.ack("celery", "w:1:x", [1], lambda: None)
    store.run.settle()
    store.bury("celery", "w:1:x", [(2, "b", "it failed", b"")])
    assert api.get("/v1/tasks/a").json()["status"] == "done"
    found = api.get("/v1/tasks/b").json()
    assert (found["status"], found["reason"]) == ("dead", "it failed")
    assert found["at"]
    assert api.get("/v1/tasks/c").status_code == 404


STARTED = ["s", 1_000, 0, "w1@host:7:ab", 7, 0]
FAILED = ["-", 3_000, 0, {"error": "ValueError", "message": "no", "run_ms": 2_000}]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([STARTED], {"status": "running", "consumer": "w1@host", "at": None}),
        ([STARTED, FAILED], {"status": "failed", "reason": "ValueError: no", "run_seconds": 2}),
        ([STARTED, ["+", 2_000, 0, 1_000]], {"status": "succeeded", "run_seconds": 1}),
        ([["x", 2_000, 0, {"why": "expired"}]], {"status": "expired"}),
    ],
)
def test_status_of_what_was_recorded(
    rows: list[Any], expected: dict[str, Any], api: httpx.Client, delayed: Delayed
) -> None:
    store, outcomes = delayed.store, Outcomes(delayed.store)
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    made = Note("a", rows[-1][0], rows[-1][1], False, '["t","till.charge",null]\n', lines)
    store.all_of(outcomes.note_calls("celery", [made], Kept(1_000, 60_000), STARTED[3]))
    found = api.get("/v1/tasks/a").json()
    assert {name: found[name] for name in expected} == expected
    assert found["task"] == "till.charge"


def test_status_of_a_task_that_is_retried(api: httpx.Client, delayed: Delayed) -> None:
    api.post("/v1/tasks", json={"task": "till.charge", "id": "a", "delay": "1h"})
    note(delayed, "a", STARTED, ["~", *FAILED[1:]])
    found = api.get("/v1/tasks/a").json()
    assert (found["status"], found["reason"]) == ("retrying", "ValueError: no")
    assert (found["started"], found["run_seconds"]) == ("1970-01-01T00:00:01+00:00", 2)
    assert (found["args"], found["at"]) == ("()", None)


@pytest.mark.parametrize("last", ["failed", "ignored", "replaced", "returned", "running"])
def test_a_ready_task_is_there_whatever_was_recorded_under_its_id(
    last: str, api: httpx.Client, delayed: Delayed
) -> None:
    replaced = {"why": "ignored", "message": "Replaced by new task"}
    rows: dict[str, list[Any]] = {
        "failed": FAILED,
        "ignored": ["x", 2_000, 0, {"why": "ignored"}],
        "replaced": ["x", 2_000, 0, replaced],
        "returned": ["b", 2_000, 0, {}],
        "running": STARTED,
    }
    note(delayed, "a", STARTED, rows[last])
    note(delayed, "b", STARTED, rows[last])
    for id in ("a", "b"):
        delayed.app.send_task("till.charge", task_id=id)
    found = api.get("/v1/tasks/a").json()
    assert (found["status"], found["waiting_for"]) == ("waiting", "worker")
    assert api.patch("/v1/tasks/a", json={"delay": "1h"}).status_code == 200
    assert api.get("/v1/tasks/a").json()["status"] == "scheduled"
    assert api.delete("/v1/tasks/b").status_code == 204
    assert api.delete("/v1/tasks/b").status_code == 409


def test_a_task_that_went_on_in_a_queue_of_others(api: httpx.Client, delayed: Delayed) -> None:
    note(delayed, "a", STARTED, ["~", 2_000, 0, {"next_ms": 2_000}])
    note(delayed, "a", ["s", 3_000, 1, WORKER, 7, 0], ["+", 4_000, 1, 5], queue="elsewhere")
    found = api.get("/v1/tasks/a").json()
    assert (found["status"], found["queue"]) == ("succeeded", "elsewhere")
    steps = api.get("/v1/tasks/a/history").json()["steps"]
    assert [step["event"] for step in steps] == ["started", "retrying", "started", "succeeded"]


def test_what_is_acked_first_is_not_done_before_it_is_recorded(
    api: httpx.Client, delayed: Delayed
) -> None:
    store = delayed.store
    api.post("/v1/tasks", json={"task": "till.charge", "id": "a"})
    store.deliver("celery", "w:1:x", 2, 1, lease_ms=60_000)
    store.ack("celery", "w:1:x", [1], lambda: None)
    store.run.settle()
    store.all_of(Outcomes(store).note_calls("celery", [], Kept(1_000, 60_000), "w:1:x"))
    assert api.get("/v1/tasks/a").json()["status"] == "running"


def test_change(api: httpx.Client, delayed: Delayed) -> None:
    id = api.post("/v1/tasks", json={**MAIL, "args": [1], "kwargs": {"a": 1}}).json()["id"]
    answer = api.patch(f"/v1/tasks/{id}", json={"delay": "3d", "priority": 9, "args": ["x"]})
    assert answer.status_code == 200, answer.text
    info = delayed.get(id)
    assert info is not None
    assert (info.priority, info.step, info.args) == (9, 9, "('x',)")
    assert [*body(delayed, id)][:2] == [["x"], {"a": 1}]
    assert info.remaining is not None
    assert info.remaining.days == 2
    assert datetime.fromisoformat(info.headers["eta"]) == info.eta
    for wrong in ({}, {"delay": "x"}, {"due": "2030-01-01", "delay": 1}, {"task": "x"}):
        assert api.patch(f"/v1/tasks/{id}", json=wrong).status_code == 422
    assert api.patch("/v1/tasks/none", json={"priority": 1}).status_code == 404
    assert api.patch(f"/v1/tasks/{id}", json={"due": "2001-01-01"}).json()["status"] == "waiting"
    assert api.patch(f"/v1/tasks/{id}", json={"priority": 1}).status_code == 200
    assert delayed.store.deliver("celery", "w1:1:a", 1, 1, lease_ms=30_000)
    assert api.patch(f"/v1/tasks/{id}", json={"priority": 1}).status_code == 409


@pytest.mark.parametrize("name", ["celery_ext.expectation", "celery.starmap", "admin.wipe"])
@pytest.mark.parametrize("change", [{"args": []}, {"kwargs": {"on_timeout": {"task": "x"}}}])
def test_arguments_of_tasks_that_the_app_does_not_allow_stay(
    api: httpx.Client, delayed: Delayed, name: str, change: dict[str, Any]
) -> None:
    """Otherwise a token for some tasks could run others, as the task that a timeout sends."""
    delayed.app.send_task(name, ["as sent"], task_id="a", countdown=3_600)
    answer = api.patch("/v1/tasks/a", json=change)
    assert answer.status_code == 422
    assert f"those of '{name}' stay as they are" in answer.text
    assert api.patch("/v1/tasks/a", json={"priority": 3}).status_code == 200
    assert body(delayed, "a")[0] == ["as sent"]


def test_run_now(api: httpx.Client, delayed: Delayed) -> None:
    id = api.post("/v1/tasks", json=MAIL).json()["id"]
    assert api.post(f"/v1/tasks/{id}/run-now").json()["status"] == "waiting"
    assert len(dump(delayed.store, "celery")["ready"]) == 1
    assert api.post(f"/v1/tasks/{id}/run-now").status_code == 200
    assert len(dump(delayed.store, "celery")["ready"]) == 1
    assert delayed.store.deliver("celery", "w1:1:a", 1, 1, lease_ms=30_000)
    assert api.post(f"/v1/tasks/{id}/run-now").status_code == 409
    assert api.post("/v1/tasks/none/run-now").status_code == 404


def test_control_of_ready_tasks(
    api: httpx.Client, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for id in ("a", "b", "c", "d"):
        assert api.put(f"/v1/tasks/{id}", json={"task": "till.charge"}).status_code == 201
    assert api.delete("/v1/tasks/a").status_code == 204
    assert api.get("/v1/tasks/a").json()["status"] == "cancelled"
    assert api.put("/v1/tasks/a", json={"task": "till.charge"}).status_code == 201
    assert api.post("/v1/tasks/c/run-now").json()["status"] == "waiting"
    assert api.patch("/v1/tasks/d", json={"args": [4]}).json()["args"] == "(4,)"
    assert api.patch("/v1/tasks/b", json={"delay": "1h"}).json()["status"] == "scheduled"
    got = delayed.store.deliver("celery", "w1:1:a", 9, 1, lease_ms=30_000)
    assert got is not None
    assert [open_envelope(each[1:], 0).id for each in got.records] == ["c", "d", "a"]
    answer = api.delete("/v1/tasks/c")
    assert (answer.status_code, "running" in answer.text) == (409, True)
    monkeypatch.setattr(ready, "READ", 0)
    for id in ("e", "f"):
        assert api.put(f"/v1/tasks/{id}", json={"task": "till.charge"}).status_code == 201
    assert api.delete("/v1/tasks/f").status_code == 204  # found without reading what is ready
    monkeypatch.setattr(ready_index, "MOST", 0)
    api.api.service.delayed.ready_index._known.clear()  # type: ignore[attr-defined]
    assert "more than 0 tasks are ready" in api.delete("/v1/tasks/e").json()["detail"]


def test_by_state(api: httpx.Client, delayed: Delayed) -> None:
    for n in range(4):
        more = {"tenant": "ada"} if n < 2 else {}
        api.put(f"/v1/tasks/{n}", json={"task": "till.charge", "priority": n, **more})
    failed = '["-",{at},0,{{"error":"ValueError","message":"no {n}","traceback":"…"}}]\n'
    head = '["t","till.charge","ada"]\n'
    now = int(time.time() * 1000)
    notes = [
        Note(f"f{n}", "-", now + n, False, head, failed.format(at=now + n, n=n)) for n in range(3)
    ]
    notes.append(Note("run", "s", now, False, head, f'["s",{now},0,"w1:1:a",7]\n'))
    outcomes = Outcomes(delayed.store)
    delayed.store.all_of(outcomes.note_calls("celery", notes, Kept(100, 60_000_000), "w1:1:a"))

    def ids(state: str, **query: Any) -> list[str]:
        found = all_rows(api, "/v1/tasks", "tasks", state=state, limit=2, **query)
        return [each["id"] for each in found]

    assert sorted(ids("ready")) == ["0", "1", "2", "3"]
    assert sorted(ids("ready", tenant="ada", task="*.charge", queue="celery")) == ["0", "1"]
    assert ids("failed") == ["f2", "f1", "f0"]
    assert ids("failed", error="ValueError: no 1") == ["f1"]
    assert ids("failed", tenant="bob") == []
    assert ids("running") == ["run"]
    assert ids("retrying") == ids("slow") == ids("dead") == ids("scheduled") == []
    bury(delayed)
    assert sorted(ids("dead")) == ["0", "1", "2", "3"]
    assert sorted(ids("dead", tenant="ada")) == ["0", "1"]
    history = api.get("/v1/tasks/f1/history").json()
    assert (history["state"], history["steps"][0]["message"]) == ("failed", "no 1")
    assert api.get("/v1/tasks/none/history").status_code == 404
    for wrong in ({"state": "x"}, {"state": "ready", "error": "x"}, {"error": "x"}):
        assert api.get("/v1/tasks", params=wrong).status_code == 422
    wrong = {"state": "failed", "due_after": "2030-01-01"}
    assert api.get("/v1/tasks", params=wrong).status_code == 422


def test_search(api: httpx.Client) -> None:
    for n in range(5):
        for queue in ("a", "b"):
            task = "till.charge" if n == 3 else "till.send_mail"
            given = {"task": task, "id": f"{queue}{n}", "queue": queue, "tenant": f"t{n % 2}"}
            api.post("/v1/tasks", json={**given, "due": f"2100-01-0{n + 1}T00:00:00Z"})

    def found(**query: Any) -> list[str]:
        return [task["id"] for task in all_rows(api, "/v1/tasks", "tasks", **query)]

    names = [f"{queue}{n}" for queue in "ab" for n in range(5)]
    for limit in (1, 2, 3, 5, 10):
        assert found(limit=limit) == names
        assert max(map(len, pages(api, "/v1/tasks", "tasks", limit=limit))) == limit
    bounds = {"due_after": "2100-01-02T00:00:00Z", "due_before": "2100-01-04T00:00:00Z"}
    assert found(queue="b", limit=2) == names[5:]
    assert found(task="*.charge", limit=1) == ["a3", "b3"]
    assert found(tenant="t1", queue="a") == ["a1", "a3"]
    assert found(**bounds, limit=1) == ["a1", "a2", "b1", "b2"]
    far, no_name = cursors.write("a", 10**400, "x"), cursors.write("a", 1, "\ud800")
    for wrong in (
        *(f"cursor={far}", f"cursor={no_name}", "cursor=x", "limit=0", "limit=1001"),
        *("due_after=x", "colour=1", "limit=1&limit=1"),
    ):
        assert api.get(f"/v1/tasks?{wrong}").status_code == 422


def test_a_search_that_finds_little_looks_at_a_bounded_number(
    api: httpx.Client, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_ext.http.api.endpoints.lists.search.LOOKED_AT", 10)
    rows = [("till.send_mail", (), {}, None, {"countdown": 60 + n}) for n in range(30)]
    delayed.schedule_many([*rows, ("till.charge", (), {}, None, {"countdown": 99})])
    found = pages(api, "/v1/tasks", "tasks", task="till.charge")
    assert len(found) > 2
    assert sum(map(len, found)) == 1


def test_a_search_goes_on_behind_empty_queues(api: httpx.Client, delayed: Delayed) -> None:
    for n in range(60):
        delayed.app.send_task("till.charge", queue=f"q{n:02}", task_id=f"t{n}", countdown=60)
    assert len(delayed.cancel_ids(f"t{n}" for n in range(59))) == 59
    answer = api.get("/v1/tasks", params={"task": "till.*"}).json()
    assert [task["id"] for task in answer["tasks"]] == ["t59"]


def test_several_tasks_with_one_id(api: httpx.Client, delayed: Delayed) -> None:
    for n in range(2):
        delayed.app.send_task("till.charge", (n,), task_id="a", countdown=60)
    assert api.delete("/v1/tasks/a").status_code == 204
    assert [*delayed.find()] == []
