"""Tokens: their rights, tenants and queues, and what the logs say about their use."""

from __future__ import annotations

import json
import logging
import threading
import time
from base64 import urlsafe_b64decode
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import redis
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner
from kombu.exceptions import OperationalError

from celery_ext import Delayed
from celery_ext.cli import delayed as cli
from celery_ext.http.api.endpoints import bulk as export
from celery_ext.http.api.endpoints import dead_letters
from celery_ext.http.api.endpoints.lists import search
from celery_ext.http.api.endpoints.lists.search import page_of
from celery_ext.http.api.models import TaskState
from celery_ext.http.auth import tokens as tokens_module
from celery_ext.http.auth.identity import Identity
from celery_ext.http.auth.tokens import Tokens
from celery_ext.http.service.service import Places
from tests.kit.http import Serve, bearer, bury
from tests.kit.outcomes import FAILED, RECEIVED, STARTED, note
from tests.kit.wait import wait_until

MAIL = {"task": "till.send_mail", "delay": "1h"}


@dataclass
class Keys:
    """Calls an API that needs a token, with one or without."""

    api: httpx.Client
    tokens: Tokens

    def make(self, *scopes: str, **bounds: Any) -> str:
        return self.tokens.create("test", scopes, **bounds)[1]

    def __call__(self, token: str | None, method: str, path: str, **given: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        return self.api.request(method, path, headers=headers | given.pop("headers", {}), **given)


@pytest.fixture
def keys(locked_api: httpx.Client, delayed: Delayed) -> Keys:
    return Keys(locked_api, Tokens(delayed))


READ = [
    ("GET", path, None)
    for path in (
        *("/v1/tasks", "/v1/tasks/a", "/v1/bulk", "/v1/queues", "/v1/queues/celery"),
        *("/v1/forecast", "/v1/consumers", "/v1/dead", "/v1/limits", "/v1/queues/celery/limits"),
        *("/v1/tenants", "/v1/tenants/ada", "/metrics"),
    )
]
SCHEDULE = [
    ("POST", "/v1/tasks", MAIL),
    ("PUT", "/v1/tasks/b", MAIL),
    ("PATCH", "/v1/tasks/a", {"priority": 3}),
    ("POST", "/v1/tasks/c/run-now", None),
    ("DELETE", "/v1/tasks/d", None),
    ("POST", "/v1/responses/k", {"payload": 1, "id": "once"}),
]
ADMIN = [("POST", f"/v1/dead/{verb}", {"ids": ["x"]}) for verb in ("replay", "purge")]


@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [
        (("read",), READ),
        (("schedule",), SCHEDULE),
        (("read", "schedule"), READ + SCHEDULE),
        (("admin",), READ + SCHEDULE + ADMIN),
    ],
)
def test_scopes(keys: Keys, app: Celery, scopes: tuple[str, ...], allowed: Any) -> None:
    for id in "acd":
        app.send_task("till.charge", task_id=id, countdown=60)
    token = keys.make(*scopes)
    for each in READ + SCHEDULE + ADMIN:
        method, path, body = each
        answer = keys(token, method, path, json=body)
        assert (answer.status_code != 403) == (each in allowed), (each, answer.text)
        assert each not in allowed or answer.is_success, (each, answer.text)
        assert keys(None, method, path, json=body).status_code == 401


@pytest.mark.parametrize(("scopes", "shown"), [(("schedule",), 0), (("schedule", "read"), 1)])
def test_a_sample_is_for_those_who_may_read(
    keys: Keys, app: Celery, scopes: tuple[str, ...], shown: int
) -> None:
    app.send_task("till.charge", ["4111 1111"], task_id="a", countdown=3_600)
    given = {"task": "*", "dry_run": True}
    answer = keys(keys.make(*scopes), "POST", "/v1/bulk/cancel", json=given).json()
    assert (answer["matched"], len(answer["sample"])) == (1, shown)


@pytest.mark.parametrize("countdown", [3_600, None])
def test_a_change_shows_content_to_those_who_may_read(
    keys: Keys, app: Celery, countdown: int | None
) -> None:
    app.send_task("till.charge", ["4111 1111"], task_id="a", countdown=countdown)
    for scopes, shown in ((("schedule",), None), (("schedule", "read"), "['4111 1111']")):
        answer = keys(keys.make(*scopes), "PATCH", "/v1/tasks/a", json={"priority": 3})
        assert answer.status_code == 200, answer.text
        assert (answer.json()["id"], answer.json()["priority"]) == ("a", 3)
        assert answer.json().get("args") == shown
        assert TaskState.model_validate(answer.json())


def test_wrong_tokens(keys: Keys) -> None:
    right = keys.make("admin")
    assert keys(right, "GET", "/v1/tasks").status_code == 200
    kind, id, secret = right.split("_", 2)
    for wrong in (
        *("x", right[:-1], right + "x", right.upper(), f"{kind}_{id}_{'A' * 43}"),
        *(f"{kind}_{'0' * 16}_{secret}", f"{kind}_*_{secret}"),
    ):
        answer = keys(wrong, "GET", "/v1/tasks")
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), wrong
    basic = keys(None, "GET", "/v1/tasks", headers={"Authorization": f"Basic {right}"})
    assert basic.status_code == 401
    assert keys(None, "GET", "/healthz").status_code == 200


def test_only_hashes_are_kept(keys: Keys, client: redis.Redis) -> None:
    secret = keys.make("admin", tenants=["a"]).split("_", 2)[2]
    kept = b"".join(client.hgetall("kombu-delayed-http:tokens").values())
    assert secret.encode() not in kept
    assert b'"hash": "' in kept


def test_revoked_and_expired(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "BELIEVED_SECONDS", 0.0)
    token = keys.make("read")
    assert keys(token, "GET", "/v1/tasks").status_code == 200
    assert keys.tokens.revoke(keys.tokens.list()[0].id)
    assert not keys.tokens.revoke("none")
    assert keys(token, "GET", "/v1/tasks").status_code == 401
    short = keys.make("read", seconds=60)
    assert keys(short, "GET", "/v1/tasks").status_code == 200
    later = tokens_module.time.time() + 61
    monkeypatch.setattr(tokens_module.time, "time", lambda: later)
    assert keys(short, "GET", "/v1/tasks").status_code == 401


# Tenants and queues. Each of `own` and `other` is a task of one tenant in one queue.


@pytest.fixture
def two(keys: Keys) -> Keys:
    admin = keys.make("admin")
    for id, tenant, queue in (("own", "ada", "mail"), ("other", "bob", "pay")):
        given = {**MAIL, "id": id, "tenant": tenant, "queue": queue}
        assert keys(admin, "POST", "/v1/tasks", json=given).status_code == 201
    keys.tokens._delayed.app.send_task("till.charge", task_id="nobody", countdown=60, queue="pay")
    return keys


BOUNDS = [{"tenants": ["ada"]}, {"queues": ["mail"]}, {"tenants": ["ada"], "queues": ["mail"]}]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/tasks/{}", None),
        ("PATCH", "/v1/tasks/{}", {"priority": 3}),
        ("DELETE", "/v1/tasks/{}", None),
        ("POST", "/v1/tasks/{}/run-now", None),
    ],
)
def test_one_task_of_another(two: Keys, bounds: Any, method: str, path: str, body: Any) -> None:
    token = two.make("admin", **bounds)
    before = {info.id: info.message for info in two.tokens._delayed.find(queue="pay")}
    for id in ("other", "nobody"):
        answer = two(token, method, path.format(id), json=body)
        assert answer.status_code == 404, answer.text
        named = two(token, method, path.format(id), json=body, params={"queue": "pay"})
        assert named.status_code in (403, 404), named.text
    assert two(token, method, path.format("own"), json=body).is_success
    put = two(token, "PUT", "/v1/tasks/other", json={**MAIL, "queue": "mail", "args": [1]})
    assert put.status_code in (201, 409)
    assert {info.id: info.message for info in two.tokens._delayed.find(queue="pay")} == before


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_lists_show_the_own_ones(two: Keys, bounds: Any) -> None:
    token = two.make("read", **bounds)

    def ids(**query: str) -> list[str]:
        found = two(token, "GET", "/v1/tasks", params=query)
        return [each["id"] for each in found.json().get("tasks", ())]

    assert ids() == ["own"]
    assert ids(limit="1") == ["own"]
    assert ids(tenant="bob") == []
    assert ids(queue="pay") == []
    admin = two.make("admin")
    page = two(admin, "GET", "/v1/tasks", params={"limit": 2}).json()
    stolen = two(token, "GET", "/v1/tasks", params={"cursor": page["next"]})
    assert stolen.json().get("tasks", []) == []


def _pages(keys: Keys, token: str, **query: Any) -> tuple[list[str], str]:
    """The ids on all pages, and everything that their cursors say to someone who decodes them."""
    ids, said = list[str](), ""
    while True:
        page = keys(token, "GET", "/v1/tasks", params=query).json()
        ids += [each["id"] for each in page["tasks"]]
        if (cursor := page["next"]) is None:
            return ids, said
        query["cursor"] = cursor
        said += urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode(errors="replace")


@pytest.mark.parametrize("state", ["scheduled", "dead", "failed"])
def test_cursors_do_not_name_tasks_of_another_tenant(
    keys: Keys, delayed: Delayed, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page may end at a task of another tenant, whose id and time are not for the caller."""
    for module in (search, dead_letters):
        monkeypatch.setattr(module, "LOOKED_AT", 25)
    for n, tenant in enumerate(("ada", *["bob@example.com"] * 30, "ada", "bob@example.com")):
        id = f"{n:02}-{tenant}"
        if state == "failed":
            note(delayed, id, RECEIVED, STARTED, FAILED, tenant=tenant)
            continue
        countdown = 3_600 + n if state == "scheduled" else None
        given = {"task_id": id, "headers": {"tenant": tenant}, "countdown": countdown}
        delayed.app.send_task("till.send_mail", **given)
    if state == "dead":
        bury(delayed)
    ids, said = _pages(keys, keys.make("read", tenants=["ada"]), state=state, limit=1)
    assert sorted(ids) == ["00-ada", "31-ada"]
    assert said
    assert "bob" not in said


@pytest.mark.parametrize(
    ("bounds", "given", "status"),
    [
        ({"tenants": ["ada"]}, {"tenant": "bob"}, 403),
        ({"tenants": ["ada"]}, {}, 201),
        ({"tenants": ["ada", "eve"]}, {}, 403),
        ({"tenants": ["ada", "eve"]}, {"tenant": "eve"}, 201),
        ({"tenants": ["ada"]}, {"headers": {"tenant": "bob"}}, 422),
        ({"tenants": ["ada"]}, {"headers": {"Tenant": "bob"}}, 422),
        ({"queues": ["mail"]}, {"queue": "pay"}, 403),
        ({"queues": ["mail"]}, {}, 403),
        ({"queues": ["mail"]}, {"queue": "mail"}, 201),
        ({"queues": ["celery"]}, {}, 201),
    ],
)
def test_create_for_another(keys: Keys, bounds: Any, given: Any, status: int) -> None:
    token = keys.make("schedule", **bounds)
    answer = keys(token, "POST", "/v1/tasks", json={**MAIL, **given})
    assert answer.status_code == status, answer.text
    again = keys(token, "PUT", "/v1/tasks/x", json={**MAIL, **given})
    assert again.status_code == status, again.text
    if status == 201 and "tenants" in bounds:
        assert {info.tenant for info in keys.tokens._delayed.find()} <= set(bounds["tenants"])


def test_a_task_without_a_route_is_refused(app: Celery, serve: Serve, delayed: Delayed) -> None:
    """In a bulk, the other lines are sent."""

    def route(name: str, *given: Any, **more: Any) -> None:
        if name == "till.send_mail":
            raise LookupError("no route")

    app.conf.update(task_routes=(route,), task_create_missing_queues=False)
    api, token = serve(needs_token=True), bearer(delayed, "schedule", queues=["celery"])
    for headers in (token, bearer(delayed, "schedule")):
        for given in ({"task": "till.send_mail"}, {"task": "till.charge", "queue": "unknown"}):
            answer = api.post("/v1/tasks", json=given, headers=headers)
            assert answer.status_code == 422, answer.text
            assert "the task cannot be sent: " in answer.json()["detail"]
    lines = [json.dumps({"task": f"till.{name}"}) for name in ("charge", "send_mail", "charge")]
    kind = {"content-type": "application/x-ndjson"}
    answer = api.post("/v1/bulk", content="\n".join(lines), headers=token | kind)
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [each.get("status") or each["problem"]["status"] for each in found] == [
        *("waiting", 422, "waiting"),
    ]


def test_put_of_an_id_that_another_has_used(keys: Keys, delayed: Delayed) -> None:
    """A task whose creation succeeds is there, even if another tenant used its id before."""
    ada, bob = (keys.make("schedule", "read", tenants=[name]) for name in ("ada", "bob"))
    given = {"task": "till.send_mail"}
    assert keys(ada, "PUT", "/v1/tasks/x", json=given).status_code == 201
    assert keys(ada, "PUT", "/v1/tasks/x", json=given).status_code == 200
    held = delayed.store.deliver("celery", "w:1:x", 1, 1, lease_ms=60_000)
    assert held is not None
    assert keys(bob, "PUT", "/v1/tasks/x", json=given).status_code == 201
    assert delayed.counts()["celery"].ready == 1
    assert keys(bob, "PUT", "/v1/tasks/y", json=MAIL).status_code == 201
    assert keys(bob, "DELETE", "/v1/tasks/y").status_code == 204
    assert keys(bob, "PUT", "/v1/tasks/y", json=MAIL).status_code == 201


def test_a_task_of_another_tenant_with_the_same_id_is_not_terminated(
    keys: Keys, delayed: Delayed
) -> None:
    """Workers that are told to end a task know only its id, and do not run it later either."""
    note(delayed, "a", RECEIVED, STARTED, tenant="bob")
    ada = keys.make("admin", tenants=["ada"])
    assert keys(ada, "PUT", "/v1/tasks/a", json=MAIL).status_code == 201
    bob, any_one = keys.make("admin", tenants=["bob"]), keys.make("admin")
    for token, status in ((ada, 409), (bob, 409), (any_one, 202)):
        assert keys(token, "POST", "/v1/tasks/a/terminate").status_code == status
    assert keys(ada, "POST", "/v1/tasks/a/run-now").status_code in (200, 204)
    assert keys(bob, "POST", "/v1/tasks/a/terminate").status_code == 409
    assert keys(ada, "DELETE", "/v1/tasks/a").status_code in (200, 204)
    assert keys(bob, "POST", "/v1/tasks/a/terminate").status_code == 202


def test_a_running_task_of_another_queue_with_the_same_id_is_not_terminated(
    keys: Keys, delayed: Delayed
) -> None:
    for queue in ("celery", "pay"):
        note(delayed, "a", RECEIVED, STARTED, queue=queue)
        delayed.app.send_task("till.send_mail", queue=queue, countdown=60)
    both = keys.make("admin", queues=["celery", "pay"])
    for token, status in ((keys.make("admin", queues=["celery"]), 409), (both, 202)):
        assert keys(token, "POST", "/v1/tasks/a/terminate").status_code == status


def test_the_whole_is_not_for_tenants(two: Keys) -> None:
    token = two.make("admin", tenants=["ada"])
    for path in ("/v1/queues", "/v1/queues/mail", "/v1/forecast", "/v1/consumers", "/metrics"):
        assert two(token, "GET", path).status_code == 403
    token = two.make("admin", queues=["mail"])
    assert [each["queue"] for each in two(token, "GET", "/v1/queues").json()["queues"]] == ["mail"]
    for path in ("/v1/queues/pay", "/metrics"):
        assert two(token, "GET", path).status_code == 403
    assert two(token, "GET", "/v1/forecast").json()["total"] == 1
    assert two(token, "GET", "/v1/forecast", params={"queue": "pay"}).status_code == 403


def test_dead_letters_of_another(two: Keys, delayed: Delayed) -> None:
    for queue in ("mail", "pay"):
        for info in [*delayed.find(queue=queue)]:
            delayed.run_now(info.id)
        bury(delayed, queue)
    for bounds in BOUNDS:
        token = two.make("admin", **bounds)
        assert [e["id"] for e in two(token, "GET", "/v1/dead").json()["letters"]] == ["own"]
        for verb in ("replay", "purge"):
            ids = {"ids": ["other", "nobody"]}
            assert two(token, "POST", f"/v1/dead/{verb}", json=ids).json() == {"changed": 0}
        assert two(token, "GET", "/v1/tasks/other").status_code == 404
    assert delayed.counts()["pay"].dead == 2


def test_events_of_another(two: Keys) -> None:
    for bounds in BOUNDS:
        token = two.make("read", **bounds)
        headers = {"Authorization": f"Bearer {token}", "last-event-id": "1-0"}
        with two.api.stream("GET", "/v1/events", headers=headers) as answer:
            lines = answer.iter_lines()
            data = next(line for line in lines if line.startswith("data"))
        assert '"own"' in data
    token = two.make("read", queues=["mail"])
    assert two(token, "GET", "/v1/events", params={"queue": "pay"}).status_code == 403


def test_a_stream_ends_with_its_token(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "BELIEVED_SECONDS", 0.0)
    headers = {"Authorization": f"Bearer {keys.make('read')}"}
    with keys.api.stream("GET", "/v1/events", headers=headers) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        keys.tokens.revoke(keys.tokens.list()[0].id)
        until = time.monotonic() + 30
        for _ in lines:
            assert time.monotonic() < until
    assert keys.api.get("/v1/tasks", headers=headers).status_code == 401


def test_a_stream_ends_when_its_token_cannot_be_looked_up(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(text: str) -> None:
        raise OperationalError("Redis does not answer")

    monkeypatch.setattr(tokens_module, "BELIEVED_SECONDS", 0.0)
    headers = {"Authorization": f"Bearer {keys.make('read')}"}
    with keys.api.stream("GET", "/v1/events", headers=headers) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        tokens = keys.api.api.middleware.tokens  # type: ignore[attr-defined]
        monkeypatch.setattr(tokens, "look", fails)
        assert [*lines] == [""]  # the answer is complete


def test_an_export_ends_with_its_token(
    keys: Keys, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "BELIEVED_SECONDS", 0.0)
    monkeypatch.setattr(export, "STEP", 1)

    def revoking(*given: Any) -> Any:
        keys.tokens.revoke(keys.tokens.list()[0].id)
        return page_of(*given)

    monkeypatch.setattr(export, "page_of", revoking)
    for n in range(3):
        app.send_task("till.charge", [n], countdown=3600)
    headers = {"Authorization": f"Bearer {keys.make('read')}"}
    answer = keys.api.get("/v1/bulk", headers=headers)
    *_, before, last = map(json.loads, answer.text.splitlines())
    assert (last["problem"]["status"], last["cursor"]) == (401, before["cursor"])


# Rules that apply to every token.


def test_exports_of_one_token_leave_threads_to_others(
    serve: Serve, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = serve(needs_token=True, threads=2, streams=6)
    may_end, asked = threading.Event(), list[str]()
    mine, other = bearer(delayed, "read"), bearer(delayed, "read")
    begin = Places.begin

    def counted(self: Places, identity: Identity) -> None:
        asked.append(identity.name)
        begin(self, identity)

    def slow(*given: Any) -> dict[str, Any]:
        may_end.wait(60)
        return page_of(*given)

    monkeypatch.setattr(Places, "begin", counted)
    monkeypatch.setattr(export, "page_of", slow)
    with ThreadPoolExecutor(3) as threads:
        exports = [threads.submit(api.get, "/v1/bulk", headers=mine) for _ in range(3)]
        try:
            wait_until(lambda: len(asked) >= 3 + 3, "the exports have asked for streams, threads")
            assert api.get("/v1/tasks", headers=other).status_code == 200
            assert api.get("/v1/bulk", headers=mine).status_code == 429  # half of the streams
        finally:
            may_end.set()
        assert [each.result().text for each in exports] == ['{"cursor":null}\n'] * 3


def test_rates(serve: Serve, delayed: Delayed) -> None:
    keys = Keys(serve(needs_token=True, rate=1.0), Tokens(delayed))
    first, second = keys.make("read"), keys.make("read")
    answers = [keys(first, "GET", "/v1/tasks/x") for _ in range(10)]
    refused = [each for each in answers if each.status_code == 429]
    assert refused
    assert all(int(each.headers["retry-after"]) >= 1 for each in refused)
    assert keys(second, "GET", "/v1/tasks/x").status_code == 404
    wrong = {keys("kd_wrong", "GET", "/v1/tasks").status_code for _ in range(10)}
    assert wrong == {401, 429}


def test_headers_of_every_answer(keys: Keys) -> None:
    for answer in (keys(None, "GET", "/docs"), keys(None, "GET", "/v1/tasks")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers


def test_pages_of_other_sites(api: httpx.Client) -> None:
    assert api.post("/v1/tasks/x/run-now", headers={"origin": "null"}).status_code == 403
    for name in ("https://evil.example", "http://[", "http://", "null"):
        assert api.post("/v1/tasks", json=MAIL, headers={"origin": name}).status_code == 403
    for site in ("cross-site", "same-site"):
        seen = {"sec-fetch-site": site}
        assert api.post("/v1/tasks", json=MAIL, headers=seen).status_code == 403
        assert api.get("/v1/delayedqueue/poll", headers=seen).status_code == 403
        assert api.get("/backlog", headers=seen).status_code == 200
    same = {"sec-fetch-site": "same-origin"}
    assert api.get("/v1/tasks", headers=same).status_code == 200
    own = {"origin": str(api.base_url).rstrip("/")}
    assert api.post("/v1/tasks", json=MAIL, headers=own).status_code == 201


def test_a_name_that_leads_here(app: Celery, serve: Serve) -> None:
    api = serve()
    api.api.middleware._hosts = frozenset({"localhost", "127.0.0.1"})  # type: ignore[attr-defined]
    assert api.get("/v1/tasks").status_code == 200
    assert api.get("/v1/tasks", headers={"host": "localhost:1"}).status_code == 200
    assert api.get("/v1/tasks", headers={"host": "evil.example"}).status_code == 421
    assert api.get("/healthz", headers={"host": "10.0.0.7:8080"}).status_code == 200
    for name in ("forwarded", "X-Forwarded-For"):
        assert api.get("/v1/tasks", headers={name: "10.0.0.7"}).status_code == 403


def test_logs_tell_who_did_what_and_no_secret(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("celery_ext.http.audit").propagate = True
    token = keys.make("schedule")
    given = {**MAIL, "id": "a", "args": ["payload-secret"], "headers": {"x": "header-secret"}}
    assert keys(token, "POST", "/v1/tasks", json=given).status_code == 201
    assert keys(token, "GET", "/v1/tasks").status_code == 403
    assert keys("kd_wrong-secret", "DELETE", "/v1/tasks/a").status_code == 401
    said = [each.getMessage() for each in caplog.records if each.name.endswith("http.audit")]
    assert len(said) == 3
    for part in (keys.tokens.list()[0].id, '"create"', '"target": "a"', '"status": 201'):
        assert part in said[0]
    assert '"status": 401' in said[2]
    for secret in (token.split("_", 2)[2], "payload-secret", "header-secret", "wrong-secret"):
        assert secret not in caplog.text


def test_command_line(app: Celery, delayed: Delayed) -> None:
    def run(*words: str, code: int = 0) -> str:
        context = CLIContext(app=app, no_color=True, workdir=None)
        result = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["token", *words], obj=context)
        assert result.exit_code == code, result.output
        return str(result.output)

    assert "no tokens" in run("list", code=1)
    text = run("create", "till", "--scope", "read", "--tenant", "ada", "--expires", "90d").strip()
    found = Tokens(delayed).look(text)
    assert found is not None
    assert (found.name, found.scopes, found.tenants) == ("till", ("read",), ("ada",))
    assert found.expires == found.created + 90 * 86_400
    shown = run("list")
    assert found.id in shown
    assert text not in shown
    run("revoke", found.id)
    run("revoke", found.id, code=1)
    assert Tokens(delayed).look(text) is None
    run("create", "x", "--scope", "write", code=2)
