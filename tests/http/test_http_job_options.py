"""Options for the creator of an HTTP job, from the request to the callback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from celery_ext import Delayed
from celery_ext.http import verify
from celery_ext.http.callbacks.job_options import JobOptions
from celery_ext.http.callbacks.jobs import JOB_TASK, job_of
from tests.kit.http import Serve
from tests.kit.jobs import Jobs, run_jobs
from tests.kit.servers import Server
from tests.kit.wait import wait_until

JOB: dict[str, Any] = {"topic": "order", "callback": "https://hooks.example/", "delay": "1h"}


@pytest.fixture(scope="module")
def jobs(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with run_jobs(shared_server, tmp_path_factory.mktemp("jobs")) as found:
        yield found


def request_at(jobs: Jobs, path: str) -> tuple[dict[str, str], bytes]:
    return next((headers, body) for where, headers, body in jobs.receiver.got if where == path)


@pytest.mark.parametrize(
    ("given", "field", "reason"),
    [
        ({"method": "HEAD"}, "method", "should be 'POST', 'PUT'"),
        ({"method": "GET", "content": 1}, "content", "GET sends none"),
        ({"callback_headers": {"Host": "x"}}, "callback_headers", "'Host' cannot be set"),
        ({"callback_headers": {"content-length": "1"}}, "callback_headers", "cannot be set"),
        ({"callback_headers": {"Webhook-Signature": "v1,x"}}, "callback_headers", "cannot be"),
        ({"callback_headers": {"Delayed-Attempt": "9"}}, "callback_headers", "cannot be set"),
        ({"callback_headers": {"a b": "x"}}, "callback_headers", "'a b' is not the name"),
        ({"callback_headers": {"": "x"}}, "callback_headers", "'' is not the name"),
        ({"callback_headers": {"a": "x\r\nHost: y"}}, "callback_headers", "the value of 'a'"),
        ({"callback_headers": {"a": "ü"}}, "callback_headers", "of ASCII"),
        ({"callback_headers": {"a": "", "A": ""}}, "callback_headers", "'A' is given twice"),
        ({"callback_headers": {"a": "x" * 4_001}}, "callback_headers", "4000"),
        (
            {"callback_headers": {f"a{n}": "x" * 3_000 for n in range(3)}},
            "callback_headers",
            "3 headers of 9006 characters",
        ),
        (
            {"callback_headers": {f"a{n}": "" for n in range(51)}},
            "callback_headers",
            "51 headers",
        ),
        ({"callback_headers": {"a": 1}}, "callback_headers.a", "valid string"),
        ({"timeout": "100ms"}, "timeout", "'100ms' is not a length of time from 1s to 1h"),
        ({"timeout": "2m"}, "timeout", "120 s is longer than the 60 s that this server allows"),
        ({"backoff": {}}, "backoff", "give either pause"),
        ({"backoff": {"pause": 1, "pauses": [1]}}, "backoff", "give either pause"),
        ({"backoff": {"pause": "8d"}}, "backoff.pause", "'8d' is not a length of time from 1s"),
        ({"backoff": {"pauses": [1, 0]}}, "backoff.pauses.1", "0 is not a length of time"),
        ({"backoff": {"pauses": [1] * 31}}, "backoff.pauses", "at most 30"),
        ({"backoff": {"pauses": [1], "factor": 3}}, "backoff", "factor is only for pause"),
        ({"backoff": {"pause": 1, "factor": 11}}, "backoff.factor", "less than or equal to 10"),
        ({"backoff": {"pause": 1, "jitter": 2}}, "backoff.jitter", "less than or equal to 1"),
        ({"backoff": {"pauses": [1]}, "retry": 1}, "retry", "leave it out"),
        ({"failure_callback": "http://10.0.0.1/"}, "failure_callback", "not a public address"),
        ({"failure_callback": "ftp://a.example/"}, "failure_callback", "http://"),
        ({"failure_callback": "http://a/" + "x" * 2_000}, "failure_callback", "2000"),
    ],
)
def test_wrong_options(api: httpx.Client, given: Any, field: str, reason: str) -> None:
    answer = api.post("/v1/tasks", json={**JOB, **given})
    assert answer.status_code == 422, answer.text
    assert [each["field"] for each in answer.json()["errors"]] == [field]
    assert reason in answer.json()["errors"][0]["detail"]


def test_a_secret_value_is_not_repeated(api: httpx.Client) -> None:
    given = {"callback_headers": {"Authorization": "hünter2"}}
    assert "nter2" not in api.post("/v1/tasks", json={**JOB, **given}).text


def test_only_what_is_given_is_stored(serve: Serve, delayed: Delayed) -> None:
    api = serve()
    plain = api.post("/v1/tasks", json={**JOB, "method": "POST", "callback_headers": {}}).json()
    backoff = {"pauses": ["10s", 60]}
    some = api.post("/v1/tasks", json={**JOB, "timeout": "5s", "backoff": backoff}).json()
    found = [delayed.get(each["id"]) for each in (plain, some)]
    stored = [job_of(delayed.app, info) for info in found if info is not None]
    assert "options" not in stored[0]
    assert (stored[0]["retry"], stored[1]["retry"]) == (3, 2)
    expected = {"seconds": [10, 60], "factor": 2, "longest": 60, "jitter": 0.1}
    assert stored[1]["options"] == {"timeout": 5, "backoff": expected}


def test_the_examples_of_the_document_are_valid(api: httpx.Client) -> None:
    examples = api.get("/openapi.json").json()["components"]["schemas"]["NewTask"]["examples"]
    assert [api.post("/v1/tasks", json=each).status_code for each in examples] == [422, 201]


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_method_and_headers(jobs: Jobs, method: str) -> None:
    seen = []

    def answer(handler: Any) -> None:
        seen.append(handler.command)
        handler.wfile.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    jobs.receiver.answers[f"/{method}"] = answer
    chosen = {"Authorization": "Bearer s", "content-type": "application/x+json"}
    jobs.wait(jobs.send(f"/{method}", method=method, callback_headers=chosen), "done")
    headers, body = request_at(jobs, f"/{method}")
    assert seen == [method]
    assert json.loads(body)["content"] == "hello"
    assert (headers["Authorization"], headers["Delayed-Attempt"]) == ("Bearer s", "1")
    assert headers["content-type"] == "application/x+json"
    assert "Content-Type" not in headers
    verify("s3cret", headers, body)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_methods_without_a_body(jobs: Jobs, method: str) -> None:
    given = {"topic": "order", "callback": jobs.receiver.url(f"/{method}"), "method": method}
    jobs.wait(jobs.api.post("/v1/tasks", json=given).json()["id"], "done")
    headers, body = request_at(jobs, f"/{method}")
    assert (body, headers.get("Content-Length")) == (b"", None)
    verify("s3cret", headers, b"")


def test_pauses_then_the_failure_callback(jobs: Jobs) -> None:
    jobs.receiver.answers["/bad"] = (500, b"", {})
    id = jobs.send(
        "/bad",
        tenant="ada",
        method="PUT",
        callback_headers={"Authorization": "Bearer s"},
        backoff={"pauses": ["1h", "3h"], "jitter": 0},
        failure_callback=jobs.receiver.url("/told"),
    )
    for retries, hours in ((1, 1), (2, 3)):
        jobs.wait(id, "scheduled", retries)
        assert hours * 3600 - 60 < jobs.remaining(id) <= hours * 3600
        jobs.delayed.run_now(id)
    reason = jobs.wait(id, "dead")["reason"]
    assert reason == "3 attempts failed, the last one: status 500"
    jobs.wait(f"{id}.failure", "done")
    (told,) = jobs.receiver.at("/told")
    assert (told["id"], told["topic"]) == (f"{id}.failure", "order")
    content = {"id": id, "topic": "order", "reason": reason, "attempts": 3}
    assert told["content"] == {**content, "callback": jobs.receiver.url("/bad")}
    headers, body = request_at(jobs, "/told")
    assert (headers["Delayed-Attempt"], "Authorization" in headers) == ("1", False)
    verify("s3cret", headers, body)


def test_a_failure_callback_is_tried_again_and_has_none(jobs: Jobs) -> None:
    for path in ("/bad", "/deaf"):
        jobs.receiver.answers[path] = (500, b"", {})
    id = jobs.send("/bad", retry=0, tenant="ada", failure_callback=jobs.receiver.url("/deaf"))
    jobs.wait(id, "dead")
    for retries in range(1, 6):
        found = jobs.wait(f"{id}.failure", "scheduled", retries)
        assert found["tenant"] == "ada"
        jobs.delayed.run_now(f"{id}.failure")
    jobs.wait(f"{id}.failure", "dead")
    assert len(jobs.receiver.at("/deaf")) == 6


def test_a_failure_callback_is_guarded_too(jobs: Jobs) -> None:
    inside = f"http://localhost:{jobs.receiver.port}/inside"
    id = jobs.send("/", callback=inside, failure_callback=inside)
    assert "not public" in jobs.wait(id, "dead")["reason"]
    assert "not public" in jobs.wait(f"{id}.failure", "dead")["reason"]
    assert jobs.receiver.at("/inside") == []


def test_the_worker_checks_headers_too(jobs: Jobs) -> None:
    given = {"topic": "t", "callback": jobs.receiver.url("/smuggled")}
    kwargs = {**given, "options": {"headers": {"Host": "inner"}}}
    jobs.delayed.app.send_task(JOB_TASK, task_id="smuggler", kwargs=kwargs)
    assert "'Host' cannot be set" in jobs.wait("smuggler", "dead")["reason"]
    assert jobs.receiver.at("/smuggled") == []


def test_jobs_of_the_version_before_run(jobs: Jobs) -> None:
    old = {"topic": "t", "callback": jobs.receiver.url("/old"), "content": 1, "retry": 3}
    kwargs = {**old, "created": 1, "postponed": 2}
    jobs.delayed.app.send_task(JOB_TASK, task_id="old", kwargs=kwargs)
    jobs.wait("old", "done")
    wait_until(lambda: jobs.receiver.at("/old"), "it was called")


def test_a_timeout_has_a_bound_at_the_worker() -> None:
    assert JobOptions().seconds(default=10, longest=5) == 10
    assert JobOptions(timeout=30).seconds(default=10, longest=60) == 30
    assert JobOptions(timeout=90).seconds(default=10, longest=60) == 60


def test_growing_pauses_have_a_bound() -> None:
    backoff = {"seconds": 10, "factor": 3, "longest": 100, "jitter": 0}
    chosen = JobOptions(backoff=backoff)
    assert [chosen.pause_seconds(retries) for retries in range(4)] == [10, 30, 90, 100]
    jittered = JobOptions(backoff={**backoff, "jitter": 0.5})
    assert all(5 <= jittered.pause_seconds(0) <= 15 for _ in range(100))
