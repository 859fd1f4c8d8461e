"""NDJSON in and out, queues, dead letters and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis.exceptions import ConnectionError

from celery_ext import Delayed
from celery_ext.http.api import cursors
from celery_ext.http.api.endpoints import bulk as export
from celery_ext.http.api.endpoints import bulk_change, event_stream
from celery_ext.http.api.endpoints.event_stream import REPEATED_MS
from celery_ext.http.service import create_once
from kombu_delayed.inspection import events as streams
from kombu_delayed.inspection.gate_usage import server_ms
from kombu_delayed.store.dead_letters import DeadLetters
from tests.kit.http import Serve, all_rows, bearer, bury
from tests.kit.wait import wait_until

NDJSON = {"content-type": "application/x-ndjson"}


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def post(api: httpx.Client, content: Any) -> list[dict[str, Any]]:
    return lines_of(api.post("/v1/bulk", content=content, headers=NDJSON))


def test_each_line_is_answered(api: httpx.Client, delayed: Delayed) -> None:
    lines = [
        '{"task": "till.charge", "id": "a", "delay": "1h"}',
        "{",
        "",
        '{"task": "till.none"}',
        '{"task": "till.charge", "delay": "x"}',
        '{"task": "till.strict"}',
        '{"task": "till.charge", "id": "b"}',
    ]
    found = post(api, "\n".join(lines))
    assert [each["line"] for each in found] == [1, 2, 4, 5, 6, 7]
    shown = [each.get("status") or each["problem"]["status"] for each in found]
    assert shown == ["scheduled", 400, 422, 422, 422, "waiting"]
    assert found[3]["problem"]["errors"][0]["field"] == "delay"
    assert "missing 1 required" in found[4]["problem"]["detail"]
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


def test_the_answer_is_bounded(serve: Serve, delayed: Delayed) -> None:
    """For short lines it would be many times as long as the request."""
    api = serve(bulk_bytes=400_000)
    found = post(api, b'{"task":"till.charge","id":"a"}\n' + b"1\n" * 199_000)
    assert found[0]["status"] == "waiting"
    assert [each["line"] for each in found] == list(range(1, len(found) + 1))
    assert found[-1]["problem"]["status"] == 413
    assert {each["problem"]["status"] for each in found[1:-1]} == {422}
    assert len(found) < 20_000
    assert delayed.counts()["celery"].ready == 1
    assert post(api, b"1\n")[0]["line"] == 1


def test_limits_of_a_body(serve: Serve) -> None:
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


@pytest.fixture
def buried(api: httpx.Client, delayed: Delayed) -> list[str]:
    for n in range(5):
        api.post("/v1/tasks", json={"task": "till.charge", "id": f"d{n}"})
    return bury(delayed)


def test_dead(api: httpx.Client, delayed: Delayed, buried: list[str]) -> None:
    found = all_rows(api, "/v1/dead", "letters", limit=2)
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
    bury(delayed)
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
        lines = answer.iter_lines()
        for line in lines:
            if line.startswith("id: "):
                id, data = line[4:], next(each for each in lines if each.startswith("data: "))
                found.append({"stream_id": id, **json.loads(data[6:])})
            if len(found) == count:
                return found
    raise AssertionError("the stream has ended")


def test_events(api: httpx.Client) -> None:
    for id in ("a", "b"):
        api.post("/v1/tasks", json={"task": "till.charge", "id": id, "delay": "1h"})
    api.delete("/v1/tasks/a")
    found = events_of(api, 3, "1-0")
    told = [("scheduled", "a"), ("scheduled", "b"), ("cancelled", "a")]
    assert [(each["event"], each["id"]) for each in found] == told
    assert [each["event"] for each in events_of(api, 1, "1-0", event="cancelled")] == ["cancelled"]
    assert [each["id"] for each in events_of(api, 1, "1-0", task_id="b")] == ["b"]
    again = events_of(api, 1, found[2]["stream_id"])
    assert again[0]["event"] in ("scheduled", "cancelled")
    assert api.get("/v1/events", headers={"last-event-id": "x"}).status_code == 400


def test_what_was_missed_of_all_queues_comes_in_order(
    api: httpx.Client, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that ends meanwhile resumes at the last id: all earlier events have arrived."""
    monkeypatch.setattr(streams, "PAGE_SIZE", 10)
    sent = [("quiet" if n in (23, 24) else "busy", f"t{n}") for n in range(33)]
    for queue, id in sent:
        delayed.app.send_task("till.charge", task_id=id, queue=queue, countdown=3600)
    found = events_of(api, len(sent), "1-0")
    places = [tuple(map(int, each["stream_id"].split("-"))) for each in found]
    assert places == sorted(places)
    told = [(each["queue"], each["id"]) for each in found]
    # Events of one millisecond in two queues have no defined order.
    for queue in ("busy", "quiet"):
        assert [each for each in told if each[0] == queue] == [
            each for each in sent if each[0] == queue
        ]


def test_a_stream_that_goes_on_begins_earlier() -> None:
    """An event may have been added to one stream when another one was just read."""
    assert event_stream._before("5000-3") == f"{5000 - REPEATED_MS}-{2**64 - 1}"
    assert event_stream._before("1-0") == f"0-{2**64 - 1}"


def test_streams_are_bounded(serve: Serve) -> None:
    api = serve(streams=1)
    with api.stream("GET", "/v1/events") as answer:
        lines = answer.iter_lines()  # kept: the stream ends with it
        assert next(lines).startswith(":")
        for path in ("/v1/events", "/v1/bulk"):
            refused = api.get(path)
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    for _ in range(2):
        wait_until(lambda: api.get("/v1/bulk").status_code == 200, "the place is given back")


# Delayed tasks as NDJSON.

ALL = [f"{queue}-{n}" for queue in "ab" for n in range(5)]


@pytest.fixture
def filled(api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> httpx.Client:
    monkeypatch.setattr(export, "STEP", 3)
    lines = [
        {"task": task, "id": f"{queue}-{n}", "queue": queue, "delay": f"{n + 1}h", "tenant": tenant}
        for queue, task, tenant in (("a", "till.send_mail", "ada"), ("b", "till.charge", "bob"))
        for n in range(5)
    ]
    assert len(post(api, "\n".join(map(json.dumps, lines)))) == 10
    api.api.service.forget_names()  # type: ignore[attr-defined]
    return api


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return [line["id"] for line in lines if "id" in line]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ALL),
        ({"queue": "b"}, ALL[5:]),
        ({"task": "*mail"}, ALL[:5]),
        ({"tenant": "bob"}, ALL[5:]),
        ({"tenant": "eve"}, []),
    ],
)
def test_export(filled: httpx.Client, given: dict[str, str], expected: list[str]) -> None:
    lines = lines_of(filled.get("/v1/bulk", params=given))
    assert ids(lines) == expected
    assert lines[-1] == {"cursor": None}


def test_each_cursor_goes_on_where_it_is(filled: httpx.Client) -> None:
    lines, seen = lines_of(filled.get("/v1/bulk")), 0
    assert len([line for line in lines if "cursor" in line]) > 2
    for line in lines[:-1]:
        if "id" in line:
            seen += 1
            continue
        rest = lines_of(filled.get("/v1/bulk", params={"cursor": line["cursor"]}))
        assert ids(rest) == ALL[seen:]


def test_wrong_exports(filled: httpx.Client) -> None:
    for given in ({"cursor": "x"}, {"limit": "5"}, {"due_after": "soon"}):
        assert filled.get("/v1/bulk", params=given).status_code == 422, given


def test_exports_of_tenants(
    filled: httpx.Client, locked_api: httpx.Client, delayed: Delayed
) -> None:
    answer = locked_api.get("/v1/bulk", headers=bearer(delayed, "read", tenants=["ada"]))
    assert ids(lines_of(answer)) == ALL[:5]


def test_a_broker_that_fails_meanwhile(
    filled: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line has the cursor to continue from."""
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
    assert ids([*lines, *rest]) == ALL


@pytest.mark.parametrize("state", ["scheduled", "ready"])
@pytest.mark.parametrize("to_queue", ["aside", "other"])
def test_a_redirect_leaves_out_what_is_there(api: httpx.Client, state: str, to_queue: str) -> None:
    """The target may be read before the other queues or after them, when it has more tasks."""
    delay = "1h" if state == "scheduled" else None
    for queue in ("mail", to_queue, to_queue):
        api.post("/v1/tasks", json={"task": "till.charge", "queue": queue, "delay": delay})
    api.api.service.forget_names()  # type: ignore[attr-defined]
    given = {"task": "till.*", "state": state, "to_queue": to_queue}
    for dry_run in (True, False):
        found = api.post("/v1/bulk/redirect", json={**given, "dry_run": dry_run}).json()
        assert (found["matched"], found["changed"]) == (1, 0 if dry_run else 1)
        assert (found["queues"], len(found["sample"])) == ({"mail": 1}, 1)
    again = api.post("/v1/bulk/redirect", json=given).json()
    assert (again["matched"], again["queues"], again["sample"]) == (0, {}, [])


@pytest.mark.parametrize("state", ["scheduled", "ready"])
def test_ids_whose_memory_has_expired_are_looked_for_once(
    api: httpx.Client, delayed: Delayed, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Each look reads the names of all keys."""
    delay = "1h" if state == "scheduled" else None
    for n in range(20):
        made = api.put(f"/v1/tasks/{n}", json={"task": "till.charge", "delay": delay})
        assert made.status_code == 201
    keys = delayed.store.keys("celery")
    delayed.store.run("DEL", *(keys.job(create_once.ledger(str(n), None)) for n in range(20)))
    looks, shards = list[Any](), Delayed.shards

    def counted(self: Delayed, queue: str | None = None) -> list[str]:
        looks.append(queue)
        return shards(self, queue)

    monkeypatch.setattr(Delayed, "shards", counted)
    answer = api.post("/v1/bulk/cancel", json={"task": "till.*", "state": state})
    assert answer.json()["changed"] == 20
    assert looks == [None]


@pytest.mark.parametrize("verb", ["reschedule", "replay"])
def test_a_due_time_is_no_millisecond_early(api: httpx.Client, delayed: Delayed, verb: str) -> None:
    """As a float, this time in seconds is less than its milliseconds."""
    api.post("/v1/tasks", json={"task": "till.charge", "id": "a"})
    if verb == "replay":
        bury(delayed)
    given = {"due": "2039-06-24T07:35:01.490Z", "task": "*"}
    if verb == "reschedule":
        given["state"] = "ready"
    assert api.post(f"/v1/bulk/{verb}", json=given).json()["changed"] == 1
    assert api.get("/v1/tasks/a").json()["due"] == "2039-06-24T07:35:01.490000+00:00"
    again = {"due": given["due"], "task": "*"}
    assert api.post("/v1/bulk/reschedule", json=again).json()["matched"] == 0


@pytest.mark.parametrize(
    ("method", "path", "given"),
    [
        ("POST", "/v1/bulk/cancel?dry_run=true", {"task": "*"}),
        ("POST", "/v1/bulk/cancel?limit=1", {"task": "*"}),
        ("POST", "/v1/tasks?delay=1h", {"task": "till.charge"}),
        ("PUT", "/v1/tasks/b?queue=mail", {"task": "till.charge"}),
        ("POST", "/v1/queues/celery/pause?for=2h", {}),
    ],
)
def test_a_field_of_the_body_in_the_query_is_not_ignored(
    api: httpx.Client, delayed: Delayed, method: str, path: str, given: Any
) -> None:
    api.post("/v1/tasks", json={"task": "till.charge", "id": "a", "delay": "1h"})
    answer = api.request(method, path, json=given)
    assert answer.status_code == 422, answer.text
    name = path.partition("?")[2].partition("=")[0]
    assert answer.json()["errors"] == [{"field": name, "detail": "it goes into the body"}]
    counts = delayed.counts()["celery"]
    assert (counts.delayed, counts.ready, delayed.pauses("celery")) == (1, 0, [])
    assert api.post("/v1/bulk/cancel?from=cron", json={"task": "*", "dry_run": True}).is_success


def test_change_by_filter(api: httpx.Client, delayed: Delayed) -> None:
    def send(**more: Any) -> None:
        rows = [
            {"task": "till.charge", "tenant": "ada" if n % 2 else "bob", "args": [n], **more}
            for n in range(12)
        ]
        content = "".join(json.dumps(row) + "\n" for row in rows)
        answer = api.post("/v1/bulk", content=content, headers=NDJSON)
        assert answer.headers["delayed-accepted"] == "12"

    def change(verb: str, **given: Any) -> tuple[int, int]:
        """Run all parts of a change by following `next`."""
        matched = changed = 0
        cursor = None
        while True:
            answer = api.post(f"/v1/bulk/{verb}", json={**given, "cursor": cursor})
            assert answer.status_code == 200, answer.text
            found = answer.json()
            assert found["matched"] <= given.get("limit", 12)
            assert found["queues"] in ({}, {"celery": found["matched"]})
            assert len(found["sample"]) == min(found["matched"], 10)
            matched, changed = matched + found["matched"], changed + found["changed"]
            cursor = found["next"]
            if cursor is None:
                return matched, changed

    def counts() -> tuple[int, int, int]:
        found = delayed.counts("celery")["celery"]
        return found.delayed, found.ready, found.dead

    send(delay="1h")
    send()
    ada = {"tenant": "ada"}
    for state in ("scheduled", "ready"):
        assert change("cancel", dry_run=True, state=state, **ada) == (6, 0)
        assert counts() == ((12, 12, 0) if state == "scheduled" else (6, 12, 0))
        assert change("cancel", state=state, limit=4, **ada) == (6, 6)
    assert counts() == (6, 6, 0)
    assert change("cancel", state="ready", **ada) == (0, 0)
    assert change("reschedule", state="ready", task="*", limit=4, due="2100-01-01") == (6, 6)
    assert change("reschedule", queue="celery", limit=5, due="2100-01-02") == (12, 12)
    assert change("reschedule", queue="celery", due="2020-01-01") == (12, 12)
    assert counts() == (0, 12, 0)
    bury(delayed, reason="ConnectionError: 7")
    assert change("replay", reason="Value*") == (0, 0)
    assert change("replay", reason="Conn*", tenant="bob", dry_run=True) == (12, 0)
    assert change("replay", reason="Conn*", limit=5) == (12, 12)
    assert counts() == (0, 12, 0)
    for n in range(3):
        api.post("/v1/tasks", json={"task": "till.charge", "delay": "1h", "id": f"r{n}"})
    api.post("/v1/tasks", json={"task": "till.charge", "queue": "other"})
    other = {"queue": "celery", "to_queue": "other"}
    assert change("redirect", dry_run=True, **other) == (3, 0)
    assert change("redirect", limit=2, **other) == (3, 3)
    assert change("redirect", state="ready", limit=5, **other) == (12, 12)
    bury(delayed, "other")
    assert counts() == (0, 0, 0)
    bob = {"queue": "other", "tenant": "bob"}
    found = api.post("/v1/bulk/replay", json={**bob, "to_queue": "celery"}).json()
    assert (found["matched"], found["changed"], counts()) == (12, 12, (0, 12, 0))
    for verb, wrong in (
        ("redirect", {"task": "*"}),
        ("redirect", {"to_queue": "other"}),
        ("redirect", {"task": "*", "to_queue": "no-such-queue"}),
        ("replay", {"task": "*", "to_queue": "no-such-queue"}),
        ("replay", {"task": "*", "to_queue": "other", "delay": "1h"}),
        ("cancel", {}),
        ("cancel", {"state": "failed", "task": "*"}),
        ("cancel", {"state": "ready", "due_after": "2030-01-01"}),
        ("reschedule", {"task": "*"}),
        ("reschedule", {"task": "*", "state": "ready", "due": "2001-01-01"}),
        ("reschedule", {"task": "*", "delay": 9, "cursor": cursors.write("celery", 0, "")}),
        ("replay", {}),
        ("replay", {"reason": ""}),
    ):
        assert api.post(f"/v1/bulk/{verb}", json=wrong).status_code == 422, wrong
    assert counts() == (0, 12, 0)


def test_a_letter_is_replayed_once_even_if_it_dies_again(
    api: httpx.Client, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(dead: DeadLetters, *given: Any, **more: Any) -> int:
        count, at_ms = replay(dead, *given, **more), server_ms(delayed.store, "celery")
        wait_until(lambda: server_ms(delayed.store, "celery") > at_ms, "it is later")
        bury(delayed)
        return count

    replay = DeadLetters.replay
    for _ in range(5):
        delayed.app.send_task("till.charge")
    bury(delayed)
    monkeypatch.setattr(bulk_change, "CALL_LIMIT", 2)
    monkeypatch.setattr(DeadLetters, "replay", dying)
    given, changed = {"task": "*", "limit": 4}, []
    while True:
        answer = api.post("/v1/bulk/replay", json=given).json()
        changed.append(answer["changed"])
        if (cursor := answer["next"]) is None or len(changed) > 3:
            break
        given["cursor"] = cursor
    assert changed == [4, 1]
