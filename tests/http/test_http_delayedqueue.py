"""The dialect `delayedqueue` at its edges: repeats, namespaces, scores, free payloads."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import redis
from kombu.exceptions import OperationalError

from celery_ext import Delayed
from celery_ext.http.dialects import long_poll
from celery_ext.http.dialects.claims import LIMIT
from celery_ext.http.dialects.delayedqueue import PULL_TASK
from celery_ext.http.dialects.queued_models import QueuedTask
from celery_ext.http.dialects.topics import Topic
from kombu_delayed.store.keys import http_topics
from tests.http.test_http_dialects import PATH, PAYLOAD, TASK, poll, send, status
from tests.http.test_http_metrics import value
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough

NOW = {**TASK, "delay": 0}


def drain(api: httpx.Client, **query: Any) -> list[str]:
    """The ids of all due tasks, in the order of polls, one at a time."""
    found = []
    while tasks := poll(api, **query):
        found.append(tasks[0]["id"])
        send(api, "POST", f"{PATH}/ack", acks=[tasks[0]["ack"]])
    return found


def old(delayed: Delayed, id: str, namespace: str, topic: str, score: int = 1, **more: Any) -> None:
    """Send a task as a server of version 0.1 did."""
    store = delayed.store
    store.run("SADD", http_topics(namespace, store.keys("").prefix), topic)
    payload = {"topics": topic, "callbackFuncName": "f", "args": []}
    delayed.app.send_task(
        PULL_TASK,
        kwargs={"score": score, "payload": payload},
        task_id=id,
        queue=f"http.{namespace}.{topic}",
        **more,
    )


# Once.


@pytest.mark.parametrize("delay", ["0s", "1h"])
def test_put_is_idempotent(api: httpx.Client, delayed: Delayed, delay: str) -> None:
    task = {**TASK, "delay": delay}
    with ThreadPoolExecutor(20) as pool:
        answers = [*pool.map(lambda _: send(api, "PUT", **task), range(20))]
    assert {each.json()["id"] for each in answers} == {"1"}
    assert sorted(each.status_code for each in answers) == [200] * 19 + [201]
    delayed.run_now("1")
    assert drain(api) == ["1"]
    assert send(api, "PUT", **task).json() == {"id": "1"}
    assert drain(api) == []


def test_a_length_of_time_is_short(api: httpx.Client) -> None:
    """The last thousand are cached, and each could be a megabyte."""
    for delay in ("0" * 100 + "1", "0" * 100 + "1s", "1h" * 51):
        answer = send(api, "PUT", **{**TASK, "delay": delay})
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"].startswith("delay")
    assert send(api, "PUT", **{**TASK, "delay": "1h" * 50}).status_code == 201


def test_put_of_what_is_no_utf_8(api: httpx.Client) -> None:
    payload = {"\udc00": "\ud800"}
    for code in (201, 200):
        content = json.dumps({**TASK, "payload": payload})
        assert api.put(PATH, content=content).status_code == code
    assert status(api)["payload"] == payload


def test_put_of_another_task_under_the_id(api: httpx.Client) -> None:
    first, second = ({**NOW, "payload": {**PAYLOAD, "args": [n]}} for n in "ab")
    assert send(api, "PUT", **first).status_code == 201
    assert drain(api) == ["1"]
    assert send(api, "PUT", **second).status_code == 201
    [got] = poll(api)
    assert got["payload"]["args"] == ["b"]
    for again in (first, second):
        assert send(api, "PUT", **again).status_code in (200, 201)


def test_put_of_what_a_put_has_changed(api: httpx.Client) -> None:
    send(api, "PUT", **TASK)
    changed = {**TASK, "delay": "0.001s", "score": 5}
    assert send(api, "PUT", **changed).status_code == 200
    wait_until(lambda: drain(api) == ["1"], "it is due")
    assert send(api, "PUT", **changed).status_code == 200
    assert drain(api) == []


def test_an_id_of_another_topic(api: httpx.Client) -> None:
    other = {**TASK, "payload": {**PAYLOAD, "topics": "sms"}}
    assert send(api, "PUT", **TASK).status_code == 201
    assert send(api, "PUT", **other).status_code == 409
    assert send(api, "DELETE", id=1).status_code == 200
    assert send(api, "PUT", **other).status_code == 201
    assert send(api, "PUT", **{**TASK, "namespace": "b"}).status_code == 201
    assert status(api)["payload"]["topics"] == "sms"


def test_delete_of_a_ready_task(api: httpx.Client) -> None:
    task = {**NOW, "id": 127}
    send(api, "PUT", **task)
    assert status(api, 127)["status"] == "waiting"
    assert send(api, "DELETE", id=127).status_code == 200
    assert poll(api) == []
    assert send(api, "PUT", **task).status_code == 201  # it may come again
    assert drain(api) == ["127"]


@pytest.mark.parametrize("topics", [["a"], {"b": 1}, True])
def test_a_task_whose_topic_cannot_be_read_stops_no_other(
    api: httpx.Client, delayed: Delayed, topics: Any
) -> None:
    send(api, "PUT", **{**TASK, "delay": "1h"})
    send(api, "PUT", **{**NOW, "id": 127})
    delayed.change("1", kwargs={"score": 0, "namespace": "default", "payload": {"topics": topics}})
    delayed.run_now("1")
    assert "127" in drain(api)


# Namespaces.


def test_names_of_queues() -> None:
    assert Topic("default", "user.created").queues == ["http.default.user.created"]
    assert Topic("a.b", "c").queues == ["http:a%2Eb.c", "http.a.b.c"]
    assert Topic("a%2Eb", "c").queues == ["http.a%2Eb.c"]
    assert Topic("a%2E.b", "c").queue == "http:a%252E%2Eb.c"


def test_namespaces_do_not_collide(api: httpx.Client) -> None:
    for namespace, topic in (("a.b", "c"), ("a", "b.c")):
        task = {**NOW, "namespace": namespace, "payload": {**PAYLOAD, "topics": topic}}
        assert send(api, "PUT", **{**task, "id": namespace}).status_code == 201
    assert drain(api, namespace="a", topics="b.c") == ["a"]
    assert drain(api, namespace="a.b", topics="c") == ["a.b"]


@pytest.mark.parametrize("first", ["a", "a.b"])
def test_tasks_under_the_old_names(api: httpx.Client, delayed: Delayed, first: str) -> None:
    pairs = {"a": "b.c", "a.b": "c"}
    for n in range(3):
        old(delayed, f"x{n}", "a.b", "c")
        old(delayed, f"y{n}", "a", "b.c")
    old(delayed, "later", "a.b", "c", countdown=3600)
    assert status(api, "later", "a.b")["status"] == "scheduled"
    assert status(api, "later", "a") == 404
    assert send(api, "POST", id="later", namespace="a.b", score=-1).status_code == 200
    delayed.run_now("later")
    found = {
        namespace: sorted(drain(api, namespace=namespace, topics=pairs[namespace]))
        for namespace in sorted(pairs, reverse=first == "a.b")
    }
    assert found == {"a": ["y0", "y1", "y2"], "a.b": ["later", "x0", "x1", "x2"]}


def test_old_tasks_by_id(api: httpx.Client, delayed: Delayed) -> None:
    old(delayed, "1", "default", "mail", countdown=3600)
    assert status(api)["status"] == "scheduled"
    assert send(api, "PUT", **TASK).status_code == 200
    assert send(api, "DELETE", id=1).status_code == 200
    assert [*delayed.find()] == []


# By id.


@contextmanager
def commands(api: httpx.Client) -> Iterator[list[tuple[Any, ...]]]:
    """The commands that the server sends to Redis."""
    store, sent = api.api.service.delayed.store, []  # type: ignore[attr-defined]
    run = type(store.run)
    original = run.__call__

    def noted(self: Any, *command: Any, **more: Any) -> Any:
        sent.append(command)
        return original(self, *command, **more)

    run.__call__ = noted
    try:
        yield sent
    finally:
        run.__call__ = original


def test_topics_cost_nothing(api: httpx.Client, delayed: Delayed) -> None:
    def cost(id: int) -> list[int]:
        counts = []
        for method, path, body in (
            ("PUT", PATH, {**TASK, "id": id}),
            ("POST", PATH, {"id": id, "score": 2}),
            ("GET", f"{PATH}/status", {"id": id}),
            ("DELETE", PATH, {"id": id}),
        ):
            with commands(api) as sent:
                assert send(api, method, path, **body).is_success
            counts.append(len(sent))
        return counts

    cost(0)
    before = cost(1)
    assert min(before) > 0
    for n in range(50):
        task = {**TASK, "id": f"t{n}", "payload": {**PAYLOAD, "topics": f"topic{n}"}}
        assert send(api, "PUT", **task).status_code == 201
        old(delayed, f"o{n}", "default", f"topic{n}", countdown=60)
    assert all(after <= known + 2 for after, known in zip(cost(2), before, strict=True))


# Scores.

SCORES = [LIMIT, 256, -1, 0, 255, -LIMIT, 3, 4, 10**15 + 1, 10**15, -(10**15), 1000, 7]


@pytest.mark.parametrize("delay", ["0s", "1h"])
def test_scores_are_exact(api: httpx.Client, delayed: Delayed, delay: str) -> None:
    for n, score in enumerate(SCORES):
        send(api, "PUT", **{**TASK, "id": n, "delay": delay, "score": score})
        delayed.run_now(str(n))
    found = drain(api)
    assert [SCORES[int(id)] for id in found] == sorted(SCORES)


def test_a_change_of_a_task_that_has_lost_its_score(api: httpx.Client, delayed: Delayed) -> None:
    """As after a change of its arguments by another program."""
    send(api, "PUT", **TASK)
    assert delayed.change("1", kwargs={"payload": PAYLOAD, "namespace": "default"})
    answer = send(api, "POST", id="1", delay="1h", payload={**PAYLOAD, "args": []})
    assert answer.status_code == 200, answer.text
    assert status(api)["score"] == 0


def test_of_one_score_who_is_due_first_goes_first(api: httpx.Client) -> None:
    ids = [str(n) for n in range(20)]
    for id in ids:
        send(api, "PUT", **{**NOW, "id": id, "score": 2})
    assert drain(api) == ids


def test_a_lot_that_is_due_is_in_order(
    api: httpx.Client, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if one call cannot sort all of it, or some tasks have no ticket."""
    monkeypatch.setattr("celery_ext.http.dialects.claims.BRING", 4)
    monkeypatch.setattr("celery_ext.http.dialects.claims.READ", 3)
    scores = [(7 * n) % 41 for n in range(41)]
    for n, score in enumerate(scores):
        if n % 3 == 0:
            old(delayed, f"{score}", "default", "mail", score, countdown=0.001)
        elif n % 3 == 1:
            old(delayed, f"{score}", "default", "mail", score)
        else:
            send(api, "PUT", **{**TASK, "id": score, "score": score, "delay": "1h"})
            delayed.run_now(str(score))
    assert [int(id) for id in drain(api)] == sorted(scores)


def test_another_score(api: httpx.Client) -> None:
    for id, score in (("a", 1), ("b", 2)):
        send(api, "PUT", **{**TASK, "id": id, "delay": "1h", "score": score})
    assert send(api, "POST", id="a", score=300, delay=0).status_code == 200
    assert send(api, "POST", id="b", delay=0).status_code == 200
    assert drain(api) == ["b", "a"]


def test_what_returns_keeps_its_place(api: httpx.Client) -> None:
    for id, score in (("a", -5), ("b", 2)):
        send(api, "PUT", **{**NOW, "id": id, "score": score})
    [lost] = poll(api, lease="1ms")
    assert lost["id"] == "a"
    wait_until(lambda: (found := poll(api)) and found[0]["id"] == "a", "its lease has ended")
    assert drain(api) == ["b"]


# As a client in Go writes it.


@pytest.mark.parametrize(
    "payload", [{"a": [1, {"b": None}]}, [1, 2], "Ynl0ZXM=", 7, None, {"Topics": "", "Args": []}]
)
def test_free_payloads(api: httpx.Client, payload: Any) -> None:
    assert send(api, "PUT", **{**NOW, "payload": payload}).status_code == 201
    [got] = poll(api, topics="default")
    assert got["payload"] == payload


def test_names_of_go(api: httpx.Client) -> None:
    payload = {"Topics": "mail", "CallbackFuncName": "send", "Args": ["ada"]}
    task = {"ID": "7", "Namespace": "n", "Delay": "1h0m0s", "Score": -3, "Payload": payload}
    assert send(api, "PUT", **task).status_code == 201
    found = status(api, "7", "n")
    assert (found["score"], found["payload"]) == (-3, payload)
    assert 3590 < float(found["delay"][:-1]) <= 3600
    assert send(api, "DELETE", ID="7", Namespace="n").status_code == 200


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("100ms", 0.1), ("1h15m30.918s", 4530.918), ("250µs", 0.00025), (".5s", 0.5), ("1m1s", 61)],
)
def test_lengths_of_go(text: str, seconds: float) -> None:
    task = QueuedTask(id="1", delay=text, payload=None)
    assert task.delay == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["'1' * 400_000", "'1.' * 200_000", "'1' * 400_000 + '.' + 's'"])
def test_a_long_length_is_no_work(text: str) -> None:
    code = f"from celery_ext.http.dialects.given import _read_length; _read_length({text})"
    # In a process of its own, because nothing could interrupt a regular expression here.
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "is not a length of time" in done.stderr


# Polls.


def test_who_waits_is_a_consumer(api: httpx.Client) -> None:
    def consumers() -> float:
        api.api.service.forget_names()  # type: ignore[attr-defined]
        return value(api, "consumers", queue="http.default.mail")

    send(api, "PUT", **{**TASK, "delay": "1h"})
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(poll, api, wait="30s") for _ in range(2)]
        wait_until(lambda: consumers() == 2, "both wait")
        send(api, "POST", id=1, delay=0)
        wait_until(lambda: any(each.done() for each in waiting), "one has it")
        send(api, "PUT", **{**NOW, "id": 2})
        found = [task for each in waiting for task in each.result()]
    assert {each["id"] for each in found} == {"1", "2"}
    send(api, "POST", f"{PATH}/ack", acks=[each["ack"] for each in found])
    assert consumers() == 0


def test_who_waits_does_not_read_the_leases_of_all_who_wait(
    api: httpx.Client, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(long_poll, "monotonic", lambda: now)
    service, topic = api.api.service, Topic("default", "mail")  # type: ignore[attr-defined]
    for _ in range(50):
        long_poll.Waiting(service, [topic]).show()
    client.config_resetstat()
    assert long_poll.claim(service, [topic], 1, 60_000) == []
    for _ in range(9):
        assert long_poll.claim(service, [topic], 1, 60_000, again=True) == []
    called = {name: each["calls"] for name, each in client.info("commandstats").items()}
    assert called["cmdstat_evalsha"] == 10 + 1  # a count each time, and the leases once
    assert "cmdstat_hlen" not in called  # neither those of the leases, nor all messages


@pytest.mark.parametrize(("waiting", "seconds"), [(1, 0.25), (100, 0.25), (1_000, 2.5)])
def test_many_who_wait_look_less_often(waiting: int, seconds: float) -> None:
    assert long_poll.interval(waiting) == seconds


def test_a_client_that_leaves_while_it_waits_gets_no_task(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()

    def interval(waiting: int) -> float:
        waits.set()
        return 1.0

    api = serve()
    monkeypatch.setattr(long_poll, "interval", interval)
    with socket.create_connection((api.base_url.host, api.base_url.port)) as client:
        client.sendall(
            f"GET {PATH}/poll?topics=mail&wait=50s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        )
        assert waits.wait(30)
    send(api, "PUT", **NOW)
    wait_until(lambda: not api.api.service.polls.taken, "its poll has ended")
    assert [each["id"] for each in poll(api, wait="0s")] == ["1"]


def test_a_claimed_task_is_answered_whatever_fails_then(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_shown = threading.Event()

    def fails(waiting: Any) -> None:
        raise OperationalError("Redis does not answer")

    api, show = serve(), long_poll.Waiting.show
    monkeypatch.setattr(long_poll.Waiting, "end", fails)
    monkeypatch.setattr(long_poll.Waiting, "show", lambda each: (show(each), is_shown.set()))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(poll, api, wait="50s")
        assert is_shown.wait(30)
        send(api, "PUT", **NOW)
        assert [each["id"] for each in waiting.result()] == ["1"]


def test_poll_limit_is_its_own(serve: Any) -> None:
    api = serve(polls=1, streams=1)
    with ThreadPoolExecutor(1) as pool, api.stream("GET", "/v1/events") as stream:
        lines = stream.iter_lines()
        assert next(lines)
        waiting = pool.submit(poll, api, wait="30s")
        wait_until(lambda: api.api.service.polls.taken, "it waits")
        refused = api.get(f"{PATH}/poll", params={"wait": "30s"})
        assert (refused.status_code, json.loads(refused.text)["status"]) == (503, 503)
        assert api.get("/v1/events").status_code == 503
        send(api, "PUT", **NOW)
        assert [each["id"] for each in waiting.result()] == ["1"]
