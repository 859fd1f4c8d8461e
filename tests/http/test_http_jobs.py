"""HTTP jobs from the request to the callback, with a real worker."""

from __future__ import annotations

import gzip
import hmac
import json
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import Ignore

from celery_ext.http import verify
from celery_ext.http.callbacks.job_options import backoff_seconds
from celery_ext.http.callbacks.jobs import JOB_TASK
from celery_ext.http.callbacks.signature import sign_webhook
from celery_ext.tasks.history import REPLACED
from kombu_delayed.store.keys import http_host
from tests.kit.jobs import Jobs, run_jobs
from tests.kit.servers import Server
from tests.kit.wait import wait_until


@pytest.fixture(scope="module")
def jobs(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with run_jobs(shared_server, tmp_path_factory.mktemp("jobs")) as found:
        yield found


def test_success(jobs: Jobs) -> None:
    id = jobs.send("/ok", delay=0.05, tenant="ada", content={"a": ["ü", 1]})
    jobs.wait(id, "done")
    assert jobs.receiver.at("/ok") == [{"id": id, "topic": "order", "content": {"a": ["ü", 1]}}]
    _, headers, body = next(each for each in jobs.receiver.got if each[0] == "/ok")
    verify("s3cret", headers, body)
    assert headers["webhook-id"] == id
    content = f"{id}.{headers['webhook-timestamp']}.".encode() + body
    expected = b64encode(hmac.digest(b"s3cret", content, "sha256")).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert headers["Content-Type"] == "application/json"


def test_retries_then_dead(jobs: Jobs) -> None:
    jobs.receiver.answers["/bad"] = (500, b'{"code": 100}', {})
    id = jobs.send("/bad", retry=3, tenant="ada")
    for retries in (1, 2, 3):
        found = jobs.wait(id, "scheduled", retries)
        assert found["tenant"] == "ada"
        wait = backoff_seconds(retries - 1)
        assert wait - 10 < jobs.remaining(id) <= wait
        jobs.delayed.run_now(id)
    assert jobs.wait(id, "dead")["reason"] == "4 attempts failed, the last one: status 500"
    assert len(jobs.receiver.at("/bad")) == 4
    attempts = [each["Delayed-Attempt"] for path, each, _ in jobs.receiver.got if path == "/bad"]
    assert attempts == ["1", "2", "3", "4"]
    assert "status 500" in jobs.worker.log
    assert "hello" not in jobs.worker.log
    assert jobs.delayed.dead.replay([id]) == 1  # with all its attempts
    for retries in (1, 2, 3):
        jobs.wait(id, "scheduled", retries)
        jobs.delayed.run_now(id)
    jobs.wait(id, "dead")
    assert len(jobs.receiver.at("/bad")) == 8


@pytest.mark.parametrize(
    ("status", "content", "headers"),
    [
        (204, b"", {}),
        (200, b"OK", {}),
        (202, gzip.compress(b"{}", mtime=0), {"Content-Encoding": "gzip"}),
        (200, b'{"code": 7}', {}),
    ],
)
def test_any_2xx_is_success(
    jobs: Jobs, status: int, content: bytes, headers: dict[str, str]
) -> None:
    jobs.receiver.answers["/any"] = (status, content, headers)
    jobs.wait(jobs.send("/any", retry=0), "done")


def test_the_example_of_standard_webhooks() -> None:
    found = sign_webhook(
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"],
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        b'{"test": 2432232314}',
        1_614_265_330,
    )
    assert found["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_later_goes_by_its_codes(jobs: Jobs) -> None:
    jobs.receiver.answers["/code"] = (200, b'{"code": 7}', {})
    given = {"topic": "order", "callback": jobs.receiver.url("/code")}
    id = jobs.api.post("/create", json=given).json()["id"]
    assert jobs.wait(id, "dead")["reason"] == "its only attempt failed: code 7"


@pytest.mark.parametrize("status", [429, 503])
def test_too_many_requests_are_no_failure(jobs: Jobs, status: int) -> None:
    jobs.receiver.got.clear()
    jobs.receiver.answers["/busy"] = (status, b"", {"Retry-After": "100"})
    id = jobs.send("/busy", retry=0, tenant="ada", priority=3)
    for count in (1, 2):
        wait_until(lambda count=count: len(jobs.receiver.at("/busy")) == count, "it was asked")
        found = jobs.wait(id, "scheduled")
        assert 80 < jobs.remaining(id) < 101
        assert (found["retries"], found["tenant"], found["priority"]) == (0, "ada", 3)
        if count == 2:
            jobs.receiver.answers["/busy"] = (204, b"", {})
        jobs.delayed.run_now(id)
    jobs.wait(id, "done")
    assert len(jobs.receiver.at("/busy")) == 3


def test_a_broker_that_fails_costs_no_job(jobs: Jobs, shared_server: Server) -> None:
    """This includes errors it answers: the key of the host's places has another type here."""
    places = http_host("127.0.0.1")
    with shared_server.client() as client:
        client.set(places, "no places")
        id = jobs.send("/failing", tenant="ada", retry=0)
        found = jobs.wait(id, "scheduled")
        assert (found["retries"], found["tenant"]) == (0, "ada")
        client.delete(places)
    jobs.delayed.run_now(id)
    jobs.wait(id, "done")
    assert len(jobs.receiver.at("/failing")) == 1


def test_what_nobody_has_thought_of_is_a_dead_letter(jobs: Jobs) -> None:
    jobs.delayed.app.send_task(JOB_TASK, task_id="odd", kwargs={"topic": "t", "callback": 1})
    jobs.wait("odd", "dead")


def test_the_inner_network(jobs: Jobs) -> None:
    id = jobs.send("/", callback=f"http://localhost:{jobs.receiver.port}/inside")
    jobs.wait(id, "dead")
    assert "which is not public" in jobs.worker.log
    assert jobs.receiver.at("/inside") == []


def test_a_host_gets_so_many_at_a_time(jobs: Jobs) -> None:
    gate, at_once, most = threading.Event(), [0], [0]
    lock = threading.Lock()

    def answer(handler: Any) -> None:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        gate.wait(60)
        with lock:
            at_once[0] -= 1
        handler.wfile.write(b'HTTP/1.1 200 OK\r\n\r\n{"code": 100}')

    jobs.receiver.answers["/slow"] = answer
    ids = [jobs.send("/slow") for _ in range(4)]
    wait_until(lambda: at_once[0] == 2, "two are there")
    wait_until(lambda: len([*jobs.delayed.find()]) >= 2, "the others wait")
    gate.set()
    for id in ids:
        jobs.delayed.run_now(id)
        jobs.wait(id, "done")
    assert most[0] == 2


@pytest.mark.parametrize(
    ("later", "changed", "is_posted"),
    [
        ({"retries": 1, "countdown": 3600}, {}, False),
        ({"retries": 1}, {}, False),  # it is due now
        ({"replaced_task_nesting": 1, "countdown": 3600}, {"postponed": 1}, False),
        ({"countdown": 3600}, {}, True),
        ({"retries": 1, "countdown": 3600}, {"content": "of another job"}, True),
    ],
)
def test_an_attempt_that_comes_back_beside_the_next_one(
    jobs: Jobs, later: dict[str, Any], changed: dict[str, Any], is_posted: bool
) -> None:
    """Its worker died between sending the next attempt and acknowledging this one."""
    jobs.receiver.got.clear()
    task = jobs.delayed.app.tasks[JOB_TASK]
    kwargs = {"topic": "t", "callback": jobs.receiver.url("/back"), "content": "c"}
    task.apply_async(kwargs={**kwargs, **changed}, task_id="back", queue="nobodys", **later)
    place = {"exchange": "", "routing_key": "nobodys", "redelivered": True}
    task.push_request(id="back", kwargs=kwargs, delivery_info=place, hostname="w")
    try:
        with nullcontext() if is_posted else pytest.raises(Ignore, match=REPLACED):
            task.run(**kwargs)
    finally:
        task.pop_request()
        assert jobs.delayed.cancel("back", "nobodys")
    assert len(jobs.receiver.at("/back")) == is_posted


def test_a_worker_ends_an_attempt_that_comes_back(jobs: Jobs, shared_server: Server) -> None:
    jobs.receiver.answers["/split"] = (500, b"", {})
    id = jobs.send("/split", backoff={"pauses": ["1h"]})
    jobs.wait(id, "scheduled", 1)
    info = jobs.delayed.get(id)
    assert info is not None
    headers = {**info.headers, "retries": 0, "eta": None}
    first = {**info.payload, "headers": headers, "deliveries": 1}
    with shared_server.client() as client:
        client.lpush("celery", json.dumps(first))
    jobs.worker.wait_for_log(f"{JOB_TASK}[{id}] ignored")
    assert len(jobs.receiver.at("/split")) == 1
    jobs.delayed.run_now(id)
    assert jobs.wait(id, "dead")["reason"] == "2 attempts failed, the last one: status 500"
    assert len(jobs.receiver.at("/split")) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("limit", ["task_soft_time_limit", "task_time_limit"])
def test_time_limits_of_the_app_are_not_those_of_jobs(
    shared_server: Server, tmp_path: Path, limit: str
) -> None:
    """A job has its own timeout, after which it is retried."""

    def answer_late(handler: Any) -> None:
        time.sleep(2.5)
        handler.wfile.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    with run_jobs(shared_server, tmp_path, "prefork", 1, app_config={limit: 1}) as jobs:
        jobs.receiver.answers["/late"] = answer_late
        jobs.wait(jobs.send("/late"), "done")
        assert len(jobs.receiver.at("/late")) == 1
