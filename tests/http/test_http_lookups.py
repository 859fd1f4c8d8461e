"""Look-ups that many clients request at once share their calls, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import redis

from celery_ext import Delayed
from celery_ext.http.api.endpoints import tasks
from celery_ext.http.problems import Problem
from celery_ext.http.service.threads import Threads, Together
from kombu_delayed.errors import ServerNotReady
from tests.kit.http import Serve, bearer
from tests.kit.wait import wait_until

MAIL = {"task": "till.send_mail", "delay": "1h"}


def together(
    items: Sequence[int],
    function: Callable[[Sequence[int]], None],
    *,
    waiting: int = 100,
    seconds: float = 30.0,
) -> list[BaseException | None]:
    """Run all items at once; returns the error of each."""
    threads = Threads(2, 10, seconds)

    async def run() -> list[BaseException | None]:
        shared = Together(threads, function, waiting)
        return await asyncio.gather(*map(shared.run, items), return_exceptions=True)

    try:
        return asyncio.run(run())
    finally:
        threads.close()


def test_one_call_for_all_that_came_before_it() -> None:
    calls: list[list[int]] = []
    assert together(range(120), lambda items: calls.append([*items]), waiting=200) == [None] * 120
    assert [len(each) for each in calls] == [50, 50, 20]
    assert [item for call in calls for item in call] == [*range(120)]


def test_a_bad_one_costs_the_others_nothing() -> None:
    done: list[int] = []

    def call(items: Sequence[int]) -> None:
        if 3 in items:
            raise ValueError("three")
        done.extend(items)

    raised = together(range(5), call)
    assert [each and str(each) for each in raised] == [None, None, None, "three", None]
    assert done == [0, 1, 2, 4]


def test_a_broker_that_cannot_be_reached_is_asked_once_for_all() -> None:
    calls: list[int] = []

    def call(items: Sequence[int]) -> None:
        calls.append(len(items))
        raise ServerNotReady("loading")

    assert {type(each) for each in together(range(5), call)} == {ServerNotReady}
    assert calls == [5]


def test_too_many_and_too_late() -> None:
    goes_on = threading.Event()
    raised = together(range(60), lambda items: goes_on.wait(5) and None, waiting=58, seconds=0.05)
    goes_on.set()
    assert all(isinstance(each, Problem) for each in raised)
    told = [str(each.detail) for each in raised if isinstance(each, Problem)]
    assert [("too many" in each, "has not answered" in each) for each in told] == [
        *[(False, True)] * 58,
        *[(True, False)] * 2,
    ]


def test_an_ask_in_each_loop() -> None:
    """A test client of Starlette has a loop for each request."""
    threads = Threads(2, 10, 30.0)
    shared: Together[int] = Together(threads, lambda items: None, 10)
    for _ in range(2):
        asyncio.run(shared.run(1))
    threads.close()


def test_clients_at_once_share_calls_and_get_their_own_answers(
    serve: Serve, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = serve()
    expected: dict[str, Any] = {}
    for n in range(10):
        api.put(f"/v1/tasks/later-{n}", json={**MAIL, "args": [n]})
        api.put(f"/v1/tasks/ready-{n}", json={"task": "till.charge", "args": [n]})
        expected |= {f"later-{n}": "scheduled", f"ready-{n}": "waiting", f"unknown-{n}": None}
    delayed.cancel("later-0")
    expected["later-0"] = "cancelled"
    calls, goes_on, look_up = [], threading.Event(), tasks.look_up

    def slow(service: Any, asks: Any) -> None:
        calls.append(len(asks))
        goes_on.wait(30)
        look_up(service, asks)

    monkeypatch.setattr(tasks, "look_up", slow)
    service = api.api.service  # type: ignore[attr-defined]
    with ThreadPoolExecutor(32) as threads:
        sent = {id: threads.submit(api.get, f"/v1/tasks/{id}") for id in expected}

        def asked() -> int:
            made = [each for some in [*service._together.values()] for each in some.values()]
            return sum(calls) + sum(len(each._waiting) for each in made)

        wait_until(lambda: asked() == len(expected), "all have asked")
        goes_on.set()
        answers = {id: each.result() for id, each in sent.items()}
    assert sum(calls) == len(expected)
    assert len(calls) <= 2
    for id, state in expected.items():
        answer = answers[id].json()
        assert answer.get("id" if state else "status") == (id if state else 404)
        assert not state or (answer["status"] == state)
        if state in ("scheduled", "waiting"):
            assert answer["args"] == f"[{id.rpartition('-')[2]}]"


def test_clients_who_may_see_different_tasks_share_calls(
    locked_api: httpx.Client, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = bearer(delayed, "read", "schedule")
    ada = bearer(delayed, "read", tenants=("ada",))
    other = bearer(delayed, "read", queues=("elsewhere",))
    for tenant in ("ada", "bob"):
        for id, delay in (("later", "1h"), ("ready", 0)):
            task = {"task": "till.charge", "tenant": tenant, "delay": delay}
            answer = locked_api.put(f"/v1/tasks/{tenant}-{id}", json=task, headers=both)
            assert answer.status_code == 201
    ids = [f"{tenant}-{id}" for tenant in ("ada", "bob") for id in ("later", "ready")]
    with ThreadPoolExecutor(12) as threads:
        found = {
            (name, id): threads.submit(locked_api.get, f"/v1/tasks/{id}", headers=token)
            for name, token in (("both", both), ("ada", ada), ("other", other))
            for id in ids
        }
    statuses = {key: each.result().status_code for key, each in found.items()}
    assert {key for key, code in statuses.items() if code == 200} == {
        *(("both", id) for id in ids),
        ("ada", "ada-later"),
        ("ada", "ada-ready"),
    }
    answer = locked_api.get("/v1/tasks/ada-later?queue=celery", headers=other)
    assert answer.status_code in (403, 404)


def test_a_damaged_message_costs_no_other_its_answer(
    api: httpx.Client, delayed: Delayed, client: redis.Redis
) -> None:
    for id in ("good", "bad"):
        api.put(f"/v1/tasks/{id}", json=MAIL)
    client.hset("{celery}:messages", "bad", b"nonsense")
    with ThreadPoolExecutor(2) as threads:
        answers = [*threads.map(api.get, ("/v1/tasks/good", "/v1/tasks/bad"))]
    assert [each.status_code for each in answers] == [200, 503]
