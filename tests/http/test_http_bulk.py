"""NDJSON in and out, queues, dead letters and events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from celery_ext import Delayed
from celery_ext.http.api import cursors

NDJSON = {"content-type": "application/x-ndjson"}


def post(api: httpx.Client, content: Any) -> list[dict[str, Any]]:
    answer = api.post("/v1/bulk", content=content, headers=NDJSON)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_each_line_is_answered(api: httpx.Client, delayed: Delayed) -> None:
    lines = [
        '{"task": "till.charge", "id": "a", "delay": "1h"}',
        "{",
        "",
        '{"task": "till.none"}',
        '{"task": "till.charge", "delay": "x"}',
        '{"task": "till.charge", "id": "b"}',
    ]
    found = post(api, "\n".join(lines))
    assert [each["line"] for each in found] == [1, 2, 4, 5, 6]
    shown = [each.get("status") or each["problem"]["status"] for each in found]
    assert shown == ["scheduled", 400, 422, 422, "waiting"]
    assert found[3]["problem"]["errors"][0]["field"] == "delay"
    counts = delayed.counts()["celery"]
    assert (counts.delayed, counts.ready) == (1, 1)


def test_many_lines_in_parts(api: httpx.Client, delayed: Delayed) -> None:
    def parts() -> Iterator[bytes]:
        text = b"".join(
            b'{"task":"till.charge","delay":"1h","id":"%d"}\n' % n for n in range(3_000)
        )
        for at in range(0, len(text), 7_777):
            yield text[at : at + 7_777]

    found = post(api, parts())
    assert [each["id"] for each in found] == [str(n) for n in range(3_000)]
    assert [each["line"] for each in found] == list(range(1, 3_001))
    assert delayed.counts()["celery"].delayed == 3_000


def test_the_answer_is_bounded(serve: Callable[..., httpx.Client], delayed: Delayed) -> None:
    """Of short lines it would be many times as long as they are."""
    api = serve(bulk_bytes=400_000)
    found = post(api, b'{"task":"till.charge","id":"a"}\n' + b"1\n" * 199_000)
    assert found[0]["status"] == "waiting"
    assert [each["line"] for each in found] == list(range(1, len(found) + 1))
    assert found[-1]["problem"]["status"] == 413
    assert {each["problem"]["status"] for each in found[1:-1]} == {422}
    assert len(found) < 20_000
    assert delayed.counts()["celery"].ready == 1
    assert post(api, b"1\n")[0]["line"] == 1


def test_what_celery_refuses(api: httpx.Client) -> None:
    found = post(api, '{"task": "till.strict"}\n{"task": "till.strict", "args": [1]}')
    assert "missing 1 required" in found[0]["problem"]["detail"]
    assert found[1]["status"] == "waiting"
    assert api.post("/v1/tasks", json={"task": "till.strict"}).status_code == 422


def test_limits_of_a_body(serve: Callable[..., httpx.Client]) -> None:
    api = serve(body_bytes=1_000, bulk_bytes=10_000)
    long = api.post("/v1/bulk", content=b"x" * 2_000, headers=NDJSON)
    assert (long.status_code, "line" in long.json()["detail"]) == (413, True)
    assert api.post("/v1/bulk", content=b"\n" * 10_001, headers=NDJSON).status_code == 413
    assert api.post("/v1/bulk", content=b"", headers=NDJSON).status_code == 200
    assert api.post("/v1/bulk", json={}).status_code == 415


def test_queues(api: httpx.Client) -> None:
    api.post("/v1/tasks", json={"task": "till.charge", "delay": "90m"})
    api.post("/v1/tasks", json={"task": "till.charge", "queue": "mail"})
    counts = {each.pop("queue"): each for each in api.get("/v1/queues").json()["queues"]}
    assert counts["celery"] == {"delayed": 1, "due": 0, "ready": 0, "unacked": 0, "dead": 0}
    assert counts["mail"]["ready"] == 1
    assert api.get("/v1/queues/celery").json()["delayed"] == 1
    forecast = api.get("/v1/forecast", params={"hours": 3, "buckets": 3}).json()
    assert [each["count"] for each in forecast["buckets"]] == [0, 1, 0]
    assert (forecast["total"], forecast["buckets"][0]["seconds"]) == (1, 3_600)
    assert api.get("/v1/forecast?buckets=0").status_code == 422


def test_consumers(api: httpx.Client, delayed: Delayed) -> None:
    api.post("/v1/tasks", json={"task": "till.charge"})
    delayed.store.deliver("celery", "w:1:x", 1, 1, lease_ms=60_000)
    found = api.get("/v1/consumers", params={"queue": "celery"}).json()["consumers"]
    assert [(each["name"], each["unacked"]) for each in found] == [("w:1:x", 1)]


@pytest.fixture
def buried(api: httpx.Client, delayed: Delayed) -> list[str]:
    ids = [f"d{n}" for n in range(5)]
    for id in ids:
        api.post("/v1/tasks", json={"task": "till.charge", "id": id})
    delayed.store.deliver("celery", "w:1:x", 5, 1, lease_ms=60_000)
    entries = [(n, id, "no", b"") for n, id in enumerate(ids, 1)]
    delayed.store.bury("celery", "w:1:x", entries)
    return ids


def test_dead(api: httpx.Client, delayed: Delayed, buried: list[str]) -> None:
    found, cursor = [], {}
    while True:
        page = api.get("/v1/dead", params={"limit": 2, **cursor}).json()
        found += page["letters"]
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert [each["letter_id"] for each in found] == buried
    assert {(each["reason"], each["task"]) for each in found} == {("no", "till.charge")}
    assert api.get("/v1/dead", params={"task": "*.mail"}).json()["letters"] == []
    replayed = api.post("/v1/dead/replay", json={"ids": ["d0", "d1", "x"], "delay": "1h"})
    assert replayed.json() == {"changed": 2}
    assert api.get("/v1/tasks/d0").json()["status"] == "scheduled"
    assert api.post("/v1/dead/purge", json={"ids": ["d2"]}).json() == {"changed": 1}
    assert delayed.counts()["celery"].dead == 2
    assert api.post("/v1/dead/purge", json={"ids": []}).status_code == 422


def test_dead_letters_go_on_whatever_happens(
    api: httpx.Client, delayed: Delayed, buried: list[str]
) -> None:
    first = api.get("/v1/dead", params={"limit": 2}).json()
    assert [each["letter_id"] for each in first["letters"]] == buried[:2]
    api.post("/v1/dead/purge", json={"ids": buried[:2]})
    api.post("/v1/tasks", json={"task": "till.charge", "id": "d9"})
    delayed.store.deliver("celery", "w:1:x", 1, 9, lease_ms=60_000)
    delayed.store.bury("celery", "w:1:x", [(9, "d9", "no", b"")])
    query = {"limit": 9, "cursor": first["next"]}
    second = api.get("/v1/dead", params=query).json()
    assert [each["letter_id"] for each in second["letters"]] == [*buried[2:], "d9"]


@pytest.mark.parametrize("parts", [("celery", 1), ("celery", -1, "a"), ("celery", 1 << 60, "a")])
def test_cursors_of_dead_letters_that_cannot_be(api: httpx.Client, parts: Any) -> None:
    cursor = cursors.write(*parts)
    assert api.get("/v1/dead", params={"cursor": cursor}).status_code == 422


def events_of(api: httpx.Client, count: int, after: str, **query: Any) -> list[dict[str, Any]]:
    found = []
    with api.stream("GET", "/v1/events", params=query, headers={"last-event-id": after}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("id: "):
                found.append({"stream_id": line[4:]})
            if line.startswith("data: "):
                found[-1] |= json.loads(line[6:])
                if len(found) == count:
                    return found
    raise AssertionError("the stream has ended")


def test_events(api: httpx.Client) -> None:
    for id in ("a", "b"):
        api.post("/v1/tasks", json={"task": "till.charge", "id": id, "delay": "1h"})
    api.delete("/v1/tasks/a")
    found = events_of(api, 3, "1-0")
    assert [(each["event"], each["id"]) for each in found] == [
        ("scheduled", "a"),
        ("scheduled", "b"),
        ("cancelled", "a"),
    ]
    assert [each["event"] for each in events_of(api, 1, "1-0", event="cancelled")] == ["cancelled"]
    assert [each["id"] for each in events_of(api, 1, "1-0", task_id="b")] == ["b"]
    again = events_of(api, 1, found[2]["stream_id"])
    assert again[0]["event"] in ("scheduled", "cancelled")
    assert api.get("/v1/events", headers={"last-event-id": "x"}).status_code == 400


def test_events_are_bounded_in_number(serve: Callable[..., httpx.Client]) -> None:
    api = serve(streams=1)
    with api.stream("GET", "/v1/events") as answer:
        lines = answer.iter_lines()  # kept: the stream ends with it
        assert next(lines).startswith(":")
        refused = api.get("/v1/events")
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
