"""Access to the pages: logins, scopes, tenants, queues, forged forms."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis
from celery import Celery

from celery_ext import Delayed
from celery_ext.http import app as app_module
from celery_ext.http.api import cursors
from celery_ext.http.auth.tokens import Tokens
from tests.kit.gates import claim, declare, mail_policies, send
from tests.kit.http import Serve, bury
from tests.kit.pages import Page, Visitor

VIEWS = [
    "/",
    "/policies",
    "/periodic",
    "/failures",
    "/trends",
    "/backlog",
    "/task",
    "/dead",
    "/tenants",
    "/consumers",
    "/partitions",
]
LIVE = [
    "/live/limit",
    "/live/overview",
    "/live/task",
    "/live/dead",
    "/live/failures",
    "/live/trends",
    "/live/policies",
    "/live/periodic",
    "/live/tenants",
    "/live/consumers",
]
WHOLE = {"/trends", "/policies", "/periodic", "/consumers", "/partitions"}


@pytest.fixture
def visitor(locked_api: httpx.Client) -> Iterator[Visitor]:
    locked_api.api.service.cache.forget()  # type: ignore[attr-defined]
    with Visitor(locked_api) as made:
        yield made


@pytest.fixture
def tokens(delayed: Delayed) -> Tokens:
    return Tokens(delayed)


def csrf_of_login(visitor: Visitor) -> str:
    return visitor.get("/login").form("/login").values("csrf")[0]


def chosen(queue: str, id: str) -> str:
    return cursors.write(queue, id)


def send_dead(app: Celery, delayed: Delayed, id: str, tenant: str, queue: str = "celery") -> None:
    app.send_task("till.charge", task_id=id, queue=queue, headers={"tenant": tenant})
    assert bury(delayed, queue, f"Boom: {tenant} failed") == [id]


def change(visitor: Visitor, csrf: str, kind: str, **given: Any) -> int:
    """Cancel tasks or drop dead letters; returns the status."""
    verb = {"backlog": "cancel", "dead": "purge"}[kind]
    given = {"csrf": csrf, "verb": verb, **given}
    return visitor.client.post(f"/{kind}/change", data=given).status_code


def test_a_mistyped_address_in_a_browser(visitor: Visitor, tokens: Tokens) -> None:
    visitor.client.headers["accept"] = "text/html,application/xhtml+xml,*/*;q=0.8"
    answer = visitor.client.get("/backlogs")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=%2Fbacklogs")
    _, secret = tokens.create("ops", ["read"])
    visitor.log_in(secret)
    page = visitor.get("/backlogs", 404)
    assert "there is no page at /backlogs" in page.text
    assert visitor.client.get("/v1/tusks").headers["content-type"] == "application/problem+json"
    del visitor.client.headers["accept"]
    assert visitor.client.get("/backlogs").headers["content-type"] == "application/problem+json"


def test_where_it_is_mounted_without_a_slash(locked_api: httpx.Client) -> None:
    site = locked_api.api.middleware._site  # type: ignore[attr-defined]
    assert site.owns("", {"method": "GET", "headers": [(b"accept", b"text/html")]})
    assert not site.owns("", {"method": "GET", "headers": []})


def test_a_login_is_needed(visitor: Visitor) -> None:
    for path in VIEWS:
        answer = visitor.client.get(path + "?queue=a%26b")
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/login?next=")
    assert visitor.client.get("/").headers["location"] == "/login"
    for path in LIVE:
        assert visitor.client.get(path).status_code == 401
    csrf = csrf_of_login(visitor)
    for path in ("/backlog/preview", "/backlog/change", "/dead/preview", "/dead/change"):
        page = visitor.post(path, {"csrf": csrf, "verb": "cancel"}, 401)
        assert "log in with a token" in page.text


def test_login_and_logout(visitor: Visitor, tokens: Tokens, client: redis.Redis) -> None:
    _, text = tokens.create("till", ["read"])
    before = visitor.get("/login") and visitor.client.cookies[visitor.cookie]
    page = visitor.log_in(f" {text} ", "/backlog?queue=celery")
    assert "Backlog" in page.text
    secret = visitor.client.cookies[visitor.cookie]
    assert secret != before
    assert secret not in text
    keys = [key.decode() for key in client.keys("kombu-delayed-http:session:*")]
    assert len(keys) == 1
    assert secret not in keys[0]
    assert 43_000 < client.ttl(keys[0]) <= 43_200
    page = visitor.post("/logout", {"csrf": visitor.csrf()})
    assert "Log in" in page.text
    visitor.client.cookies.set(visitor.cookie, secret)
    assert visitor.client.get("/backlog").status_code == 303
    assert not client.keys("kombu-delayed-http:session:*")


def test_two_ports_of_one_host(visitor: Visitor, tokens: Tokens, serve: Serve) -> None:
    """Browsers send the cookies of one port to the other."""
    visitor.log_in(tokens.create("till", ["read"])[1])
    with Visitor(serve(needs_token=True)) as other:
        other.client.cookies = visitor.client.cookies
        assert other.client.get("/").headers["location"] == "/login"
        other.log_in(tokens.create("other", ["read"])[1])
        assert visitor.client.get("/dead").status_code == 200
        other.post("/logout", {"csrf": other.csrf()})
        assert other.client.get("/dead").status_code == 303
    assert visitor.client.get("/dead").status_code == 200


@pytest.mark.parametrize(
    ("target", "lands"),
    [
        ("/dead?queue=a", "/dead?queue=a"),
        ("https://evil.example/", "/"),
        ("//evil.example/", "/"),
        ("/\\evil.example/", "/"),
        ("/a\r\nset-cookie: x=y", "/"),
        ("", "/"),
    ],
)
def test_where_a_login_leads(visitor: Visitor, tokens: Tokens, target: str, lands: str) -> None:
    _, text = tokens.create("till", ["read"])
    given = {"csrf": csrf_of_login(visitor), "token": text, "next": target}
    answer = visitor.client.post("/login", data=given)
    assert answer.headers["location"] == lands
    cookie = answer.headers["set-cookie"].lower()
    assert all(part in cookie for part in ("httponly", "samesite=strict", "path=/"))


@pytest.mark.parametrize("other", ["Basic YWRhOng=", "Bearer eyJhbGciOiJIUzI1NiJ9.e30.x"])
def test_an_authorization_for_a_proxy(visitor: Visitor, tokens: Tokens, other: str) -> None:
    visitor.client.headers["Authorization"] = other
    page = visitor.log_in(tokens.create("till", ["read"])[1], "/backlog")
    assert "Backlog" in page.text
    assert visitor.client.get("/v1/queues").status_code == 401


def test_a_token_that_was_revoked_and_that_a_proxy_adds(visitor: Visitor, tokens: Tokens) -> None:
    """The login would lead to itself."""
    token, text = tokens.create("proxy", ["read"])
    tokens.revoke(token.id)
    visitor.client.headers["Authorization"] = f"Bearer {text}"
    page = visitor.log_in(tokens.create("till", ["read"])[1], "/backlog")
    assert "Backlog" in page.text
    assert visitor.client.get("/healthz").status_code == 200
    assert visitor.client.get("/v1/queues").status_code == 401


def test_a_link_of_another_site_replaces_no_cookie(
    visitor: Visitor, tokens: Tokens, api: httpx.Client
) -> None:
    """Browsers follow such a link without the cookie; the answer opens it again, with it."""
    visitor.log_in(tokens.create("till", ["read"])[1])
    link = {"sec-fetch-site": "cross-site"}
    with Visitor(api) as unlocked:
        unlocked.get("/backlog")
        for each in (visitor, unlocked):
            for path in ("/task?id=a", "/backlog"):
                answer = httpx.get(each.client.base_url.join(path), headers=link)
                assert answer.status_code == 200
                assert "set-cookie" not in answer.headers, path
                assert Page(answer.text).all("meta")[-1].get("http-equiv") == "refresh"
            assert "Backlog" in each.client.get("/backlog", headers=link).text
    assert httpx.get(visitor.client.base_url.join("/live/dead"), headers=link).status_code == 401


@pytest.mark.parametrize("wrong", ["", "x", "kd_0000000000000000_" + "A" * 43, "Bearer x"])
def test_a_wrong_token(visitor: Visitor, wrong: str) -> None:
    csrf = csrf_of_login(visitor)
    page = visitor.post("/login", {"csrf": csrf, "token": wrong}, 401)
    assert "not known, was revoked or has expired" in page.text
    assert visitor.client.get("/").status_code == 303


@pytest.mark.parametrize("options", [{}, {"rate": 1.0}])
def test_wrong_tokens_are_slowed(
    serve: Serve, tokens: Tokens, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the default. A correct token from the same address is accepted."""
    monkeypatch.setattr(app_module, "WRONG_TOKENS_PER_SECOND", 0.001)
    with Visitor(serve(needs_token=True, **options)) as visitor:
        csrf = csrf_of_login(visitor)
        given = {"csrf": csrf, "token": "x"}
        found = [visitor.client.post("/login", data=given).status_code for _ in range(9)]
        assert set(found) == {401, 429}
        wrong = {"Authorization": "Bearer x"}
        api = [visitor.client.get("/v1/queues", headers=wrong).status_code for _ in range(9)]
        assert 429 in api
        right = {"Authorization": f"Bearer {tokens.create('till', ['read'])[1]}"}
        assert visitor.client.get("/v1/queues", headers=right).status_code == 200


def test_a_rate_is_not_for_what_pages_consist_of(serve: Serve) -> None:
    """All visitors ask for it without their tokens: few of them would have used up the rate."""
    with Visitor(serve(rate=0.001)) as visitor:
        page = visitor.get("/backlog")
        parts = [each["href"] for each in page.all("link")] + [page.all("script")[0]["src"]]
        assert [visitor.client.get(path).status_code for path in parts * 2] == [200] * 6
        assert visitor.client.get("/backlog").status_code == 429
        assert visitor.client.get("/healthz").status_code == 200


def test_a_stream_ends_with_its_login(
    visitor: Visitor, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_ext.http.auth.tokens.BELIEVED_SECONDS", 0.0)
    token, text = tokens.create("till", ["read"])
    visitor.log_in(text)
    with visitor.client.stream("GET", "/live/overview") as stream:
        lines = stream.iter_lines()
        assert "event: look" in lines
        tokens.revoke(token.id)
        for _ in lines:
            pass
    assert visitor.client.head("/").status_code == 303
    assert visitor.client.get("/live/overview").status_code == 401


def test_a_session_is_for_pages_only(visitor: Visitor, tokens: Tokens) -> None:
    _, text = tokens.create("till", ["admin"])
    visitor.log_in(text)
    assert visitor.client.get("/v1/tasks").status_code == 401
    assert visitor.client.post("/v1/tasks", json={"task": "till.charge"}).status_code == 401


@pytest.mark.parametrize(
    ("scopes", "sees", "changes", "replays"),
    [
        (["read"], True, False, False),
        (["schedule"], False, True, False),
        (["read", "schedule"], True, True, False),
        (["admin"], True, True, True),
    ],
)
def test_scopes(
    visitor: Visitor,
    tokens: Tokens,
    app: Celery,
    delayed: Delayed,
    scopes: list[str],
    sees: bool,
    changes: bool,
    replays: bool,
) -> None:
    app.send_task("till.charge", task_id="a", countdown=60)
    send_dead(app, delayed, "d", "ada")
    given = {"csrf": csrf_of_login(visitor), "token": tokens.create("till", scopes)[1]}
    visitor.client.post("/login", data=given)
    for path in [*VIEWS, "/task?id=a", "/dead?task=till.*"]:
        assert visitor.client.get(path).status_code == (200 if sees else 403), path
    page = visitor.client.get("/backlog").text + visitor.client.get("/dead?task=*").text
    assert ("Cancel …" in page) == (sees and changes)
    assert ("Replay …" in page) == replays
    csrf = re.findall(r'name="csrf" value="(\w+)"', page)[0]
    for kind, id, may in (("backlog", "a", changes), ("dead", "d", replays)):
        status = change(visitor, csrf, kind, chosen=chosen("celery", id))
        assert status == (303 if may else 403)
    assert (delayed.get("a") is None) == changes
    assert (delayed.dead.show("d") is None) == replays


BOUNDS = [{"tenants": ["ada"]}, {"queues": ["mail"]}]


@pytest.fixture(params=BOUNDS, ids=str)
def bounds(
    request: pytest.FixtureRequest, visitor: Visitor, tokens: Tokens, app: Celery, delayed: Delayed
) -> dict[str, list[str]]:
    """The bounds of a visitor who may see tasks of ada in mail, but none of bob in vault."""
    for tenant, queue in (("ada", "mail"), ("bob", "vault")):
        given = {"queue": queue, "headers": {"tenant": tenant}}
        app.send_task("till.charge", task_id=f"in-{queue}", countdown=60, **given)
        send_dead(app, delayed, f"dead-{queue}", tenant, queue)
    visitor.log_in(tokens.create("till", ["admin"], **request.param)[1])
    return dict(request.param)


def test_who_is_bound_sees_its_own(visitor: Visitor, bounds: dict[str, list[str]]) -> None:
    hidden, refused = ("bob", WHOLE) if "tenants" in bounds else ("vault", set())
    for path in VIEWS:
        answer = visitor.client.get(path)
        assert answer.status_code == (403 if path in refused else 200), path
        assert hidden not in answer.text, path
        asked = visitor.client.get(f"{path}?queue=vault&tenant=bob")
        assert asked.status_code in (200, 403, 404)
        assert not re.search("(in|dead)-vault", asked.text)
    for id in ("in-vault", "dead-vault"):
        visitor.get(f"/task?id={id}", 404)
        visitor.get(f"/task?id={id}&queue=vault", 404 if "tenants" in bounds else 403)
    assert "in-mail" in visitor.get("/backlog").text
    assert "dead-mail" in visitor.get("/dead?task=*").text
    if "queues" in bounds:
        visitor.get("/backlog?queue=vault", 403)
        return
    for path in ("/live/consumers", "/live/overview"):
        assert visitor.client.get(path).status_code == 403
    assert "This token is restricted to tenants" in visitor.get("/").text
    assert "Nothing matches" in visitor.get("/backlog?tenant=bob").text


def test_who_is_bound_changes_its_own(
    visitor: Visitor, bounds: dict[str, list[str]], delayed: Delayed
) -> None:
    csrf = visitor.csrf()
    for kind, state in (("backlog", "in"), ("dead", "dead")):
        other = chosen("vault", f"{state}-vault")
        assert change(visitor, csrf, kind, chosen=other) == (403 if "queues" in bounds else 303)
        for given in ({"all": "1", "tenant": "bob"}, {"all": "1"}):
            assert change(visitor, csrf, kind, **given) == 303
    assert [info.id for info in delayed.find()] == ["in-vault"]
    assert [each.letter.id for each in delayed.dead.list()] == ["dead-vault"]


def test_limits_of_a_tenant(app: Celery, delayed: Delayed, tokens: Tokens, serve: Serve) -> None:
    declare(app, mail=mail_policies())
    for tenant in ("ada", "bob"):
        send(app, tenant, 4, host=f"{tenant}.example")
    assert len(claim(delayed).records) == 3
    paths = ["/tenants", "/limit?queue=mail&name=all", "/limit?queue=mail&name=tenant"]
    with Visitor(serve(needs_token=True)) as visitor:
        visitor.log_in(tokens.create("till", ["read"], tenants=["ada"])[1])
        for path in (*paths, "/tenants?tenant=bob"):
            page = visitor.get(path)
            assert not [each for each in page.links() if "bob" in each]
            assert "bob" not in page.text
        assert "/backlog?tenant=ada&queue=mail" in visitor.get("/tenants").links()
        assert "In use of all" not in {m["aria-label"] for m in visitor.get(paths[1]).all("meter")}
    with Visitor(serve(needs_token=True)) as visitor:
        visitor.log_in(tokens.create("till", ["read"], queues=["pay"])[1])
        assert "No limits" in visitor.get("/tenants").text
        for path in (*paths[1:], "/tenants?queue=mail"):
            visitor.get(path, 403)


def test_forms_of_others(api: httpx.Client, app: Celery, delayed: Delayed) -> None:
    app.send_task("till.charge", task_id="a", countdown=60)
    given = {"verb": "cancel", "chosen": chosen("celery", "a")}
    with Visitor(api) as visitor, Visitor(api) as other, Visitor(api) as nobody:
        visitor.get("/backlog")
        other.get("/backlog")
        right = {**given, "csrf": visitor.csrf()}
        for wrong in (given, *({**given, "csrf": csrf} for csrf in ("", "x", "0" * 64))):
            visitor.post("/backlog/change", wrong, 403)
        other.post("/backlog/change", right, 403)
        nobody.post("/backlog/change", right, 403)
        evil = {"origin": "https://evil.example"}
        assert visitor.client.post("/backlog/change", data=right, headers=evil).status_code == 403
        for path in ("/backlog/change", "/dead/change", "/backlog/preview"):
            answer = visitor.client.get(path, params=right)
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
            assert "takes forms only" in Page(answer.text).text
            assert "/backlog" in Page(answer.text).links()
        assert delayed.get("a") is not None
        visitor.post("/backlog/change", right)
    assert delayed.get("a") is None


def test_what_is_told_of_it(
    visitor: Visitor, tokens: Tokens, app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_ext.http.audit")
    token, text = tokens.create("till", ["admin"])
    app.send_task("till.charge", task_id="a", countdown=60)
    visitor.log_in(text)
    csrf = visitor.csrf()
    visitor.post(
        "/backlog/change", {"csrf": csrf, "verb": "cancel", "chosen": chosen("celery", "a")}
    )
    visitor.post("/logout", {"csrf": csrf})
    told = [each.getMessage() for each in caplog.records if each.name == "celery_ext.http.audit"]
    assert any('"action": "login"' in line and token.id in line for line in told)
    assert any('"action": "cancel", "target": "a"' in line for line in told)
    for secret in (text.split("_", 2)[2], visitor.client.cookies.get(visitor.cookie) or "?", csrf):
        assert secret not in caplog.text


def test_what_is_told_of_many(
    visitor: Visitor, tokens: Tokens, app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """Where they went is told, too, and their number, as the end of many ids is cut off."""
    caplog.set_level(logging.INFO, "celery_ext.http.audit")
    ids = [f"{n:036}" for n in range(9)]
    for id in ids:
        app.send_task("till.charge", task_id=id, countdown=60)
    visitor.log_in(tokens.create("till", ["admin"])[1])
    csrf = visitor.csrf()
    moved = {"verb": "move", "how": "later", "by": "1h"}
    for given in ({"chosen": [chosen("celery", id) for id in ids]}, {"all": "1", "task": "till.*"}):
        visitor.post("/backlog/change", {"csrf": csrf, **moved, **given})
    told = [each.getMessage() for each in caplog.records if '"action": "move"' in each.getMessage()]
    goal = "{'how': 'later', 'by': '1h'}"
    assert f'"target": "9 tasks with {goal}: {ids[0]},{ids[1]}' in told[0]
    assert f"\"target\": \"9 tasks with {{'task': 'till.*', {goal[1:]}\"" in told[1]
