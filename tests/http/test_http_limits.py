"""Limits and tenants over HTTP: how much there is, what waits, and who sees which of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import redis
from celery import Celery

from celery_ext import Delayed
from celery_ext.control import limit_usage
from celery_ext.http.auth.tokens import Tokens
from celery_ext.policies import Drain, Fair, Limit, Message, Run, Running, Shares, Throttler
from tests.kit.gates import claim, declare, mail_policies, send

LONG = "z" * 150


class Counted(Throttler):
    def decide(self, message: Message, running: Running) -> Run:
        return Run()


@pytest.fixture
def mail(app: Celery, delayed: Delayed) -> Celery:
    """An app of which three mails run: one each of ada, bob and eve; and eleven wait."""
    declare(app, mail=mail_policies())
    for tenant, count in (("ada", 6), ("bob", 4), ("eve", 2), ("a/b c", 2)):
        send(app, tenant, count, host=f"{tenant}.example")
    assert len(claim(delayed).records) == 3
    return app


@pytest.fixture
def api(mail: Celery, serve: Callable[..., httpx.Client]) -> httpx.Client:
    return serve()


def get(api: httpx.Client, path: str, **query: Any) -> Any:
    answer = api.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_limits(api: httpx.Client) -> None:
    found = {each["name"]: each for each in get(api, "/v1/limits")["limits"]}
    assert list(found) == ["all", "host", "tenant"]
    own = found["all"]
    assert (own["queue"], own["kind"], own["by"], own["declared"]) == ("mail", "limit", None, True)
    assert (own["capacity"], own["in_use"], own["waiting"]) == (3, 3, 11)
    assert (own["critical"], own["keys"], own["busiest"]) == (True, None, [])
    assert own["first_due"] is not None
    host = found["host"]
    assert (host["capacity"], host["in_use"], host["rate"], host["burst"]) == (
        None,
        None,
        "60/h",
        2,
    )
    tenant = found["tenant"]
    assert (tenant["capacity"], tenant["in_use"], tenant["by"]) == (2, 3, "tenant")
    assert [(each["key"], each["in_use"]) for each in tenant["busiest"]] == [
        ("a/b c", 1),
        ("ada", 1),
        ("bob", 1),
    ]


def test_limits_come_in_pages(api: httpx.Client, mail: Celery) -> None:
    names, cursor = [], None
    while True:
        more = {"cursor": cursor} if cursor else {}
        page = get(api, "/v1/limits", limit=1, **more)
        names += [each["name"] for each in page["limits"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert names == ["all", "host", "tenant"]
    assert get(api, "/v1/limits", queue="celery")["limits"] == []
    assert api.get("/v1/limits", params={"cursor": "x"}).status_code == 422


def test_limits_of_a_queue(api: httpx.Client) -> None:
    found = get(api, "/v1/queues/mail/limits")
    assert (found["turns_by"], found["waiting"], found["is_complete"]) == ("tenant", 11, True)
    assert found["waiting_for_turn"] == 0
    assert [each["name"] for each in found["limits"]] == ["all", "host", "tenant"]
    nothing = get(api, "/v1/queues/celery/limits")
    assert (nothing["turns_by"], nothing["waiting"], nothing["limits"]) == (None, 0, [])


def test_one_limit(api: httpx.Client, delayed: Delayed) -> None:
    found = get(api, "/v1/queues/mail/limits/all")
    assert (found["waiting"], len(found["tasks"]), found["page"]) == (11, 11, [])
    assert {each["waiting_for"] for each in found["tasks"]} == {"the limit all"}
    assert {each["status"] for each in found["tasks"]} == {"waiting"}
    first = found["tasks"][0]
    assert delayed.cancel(first["id"])
    left = get(api, "/v1/queues/mail/limits/all")["tasks"]
    assert first["id"] not in {each["id"] for each in left}
    assert len(left) == 10
    assert api.get("/v1/queues/mail/limits/none").status_code == 404


def test_keys_of_a_limit(
    app: Celery, delayed: Delayed, serve: Callable[..., httpx.Client], client: redis.Redis
) -> None:
    declare(app, mail=[Limit(concurrency=1, rate="1/d", burst=3, by="host")])
    for n in range(6):
        send(app, "ada", n + 1, host=f"host-{n}")
    assert len(claim(delayed).records) == 6
    api, path = serve(), "/v1/queues/mail/limits/host"
    first = get(api, path, limit=4)
    keys = [(each["key"], each["in_use"], each["waiting"]) for each in first["page"]]
    assert keys == [(f"host-{n}", 1, n) for n in (5, 4, 3, 2)]
    assert {each["tokens"] for each in first["page"]} == {2.0}
    assert (first["keys"], first["in_use"], first["waiting"]) == (6, 6, 15)
    second = get(api, path, limit=4, cursor=first["next"])
    assert [each["key"] for each in second["page"]] == ["host-1", "host-0"]
    assert second["next"] is None
    assert [each["key"] for each in get(api, path, key="-3")["page"]] == ["host-3"]


def test_shares_and_drains(
    app: Celery, delayed: Delayed, serve: Callable[..., httpx.Client]
) -> None:
    shares = Shares(4, {"ada": 0.5, "bob": 0.25}, by="tenant", borrow=False)
    declare(app, mail=[shares, Drain("5/s", after="5m")], pay=[Shares(4, {"ada": 0.5}), Counted()])
    for tenant in ("ada", "bob", "eve"):
        send(app, tenant, 3)
        send(app, tenant, 3, queue="pay")
    assert len(claim(delayed).records) == len(claim(delayed, queue="pay").records) == 4
    api = serve()
    late, own = get(api, "/v1/limits", queue="mail")["limits"]
    assert (late["name"], late["kind"], late["rate"], late["after_seconds"]) == (
        *("late", "drain", "5/s"),
        300.0,
    )
    assert (late["tokens"], late["in_use"], late["waiting"]) == (1.0, None, 0)
    assert (own["capacity"], own["in_use"], own["waiting"], own["keys"]) == (4, 4, 5, None)
    assert [(s["key"], s["slots"], s["in_use"], s["waiting"]) for s in own["shares"]] == [
        ("ada", 2, 2, 1),
        ("bob", 1, 1, 2),
        ("", 1, 1, 2),
    ]
    assert len(get(api, "/v1/queues/mail/limits/shares")["tasks"]) == 5
    tasks, tenants, borrowed = get(api, "/v1/limits", queue="pay")["limits"]
    assert (tasks["kind"], tasks["capacity"], tasks["in_use"]) == ("throttler", None, 4)
    assert tenants["name"] == "running tenant"
    assert {each["in_use"] for each in borrowed["shares"]} == {None}
    ada = get(api, "/v1/tenants/ada")
    assert ada["waiting"] == 1 + 3 - next(
        each["in_use"] for each in tenants["busiest"] if each["key"] == "ada"
    )
    (wait,) = next(each["waits_for"] for each in ada["queues"] if each["queue"] == "mail")
    assert wait == {"limit": "shares", "key": "ada", "waiting": 1}


def test_limits_of_a_task(
    app: Celery, delayed: Delayed, serve: Callable[..., httpx.Client]
) -> None:
    app.tasks["till.charge"].policies = [Limit(concurrency=1, by="card")]
    app.conf.task_routes = {"till.charge": {"queue": "pay"}}
    declare(app, mail=[Fair()])
    for queue in ("pay", "pay", "mail"):
        app.send_task("till.charge", kwargs={"card": "4711"}, queue=queue)
    api = serve()
    name = "till.charge/card"
    (found,) = get(api, "/v1/limits")["limits"]
    assert (found["queue"], found["name"], found["task"]) == ("pay", name, "till.charge")
    assert len(claim(delayed, queue="pay").records) == len(claim(delayed).records) == 1
    api.api.service.recent.forget()  # type: ignore[attr-defined]
    assert {each["queue"] for each in get(api, "/v1/limits")["limits"]} == {"mail", "pay"}
    detail = get(api, f"/v1/queues/pay/limits/{quote(name, safe='')}")
    assert [(each["key"], each["waiting"]) for each in detail["page"]] == [("4711", 1)]
    assert get(api, f"/v1/queues/pay/limits/{name}")["page"] == detail["page"]


def test_what_the_app_does_not_declare(
    mail: Celery, shared_api: httpx.Client, client: redis.Redis
) -> None:
    shared_api.api.service.forget_names()  # type: ignore[attr-defined]
    shared_api.api.service.recent.forget()  # type: ignore[attr-defined]
    found = {each["name"]: each for each in get(shared_api, "/v1/limits")["limits"]}
    assert set(found) == {"all", "tenant"}
    own = found["all"]
    assert (own["kind"], own["declared"], own["capacity"]) == ("undeclared", False, None)
    assert (own["in_use"], own["waiting"]) == (3, 11)
    assert get(shared_api, "/v1/tenants")["tenants"] == []


def test_tenants(api: httpx.Client) -> None:
    found = get(api, "/v1/tenants")
    assert found["is_complete"]
    assert [(each["tenant"], each["waiting"]) for each in found["tenants"]] == [
        ("ada", 5),
        ("bob", 3),
        ("eve", 2),
        ("a/b c", 1),
    ]
    ada = found["tenants"][0]
    assert (ada["queue"], ada["weight"], ada["turn"]) == ("mail", 3.0, None)
    assert ada["waits_for"] == [{"limit": "all", "key": None, "waiting": 5}]
    assert ada["in_use"] == [{"limit": "tenant", "capacity": 2, "in_use": 1}]
    assert [t["tenant"] for t in get(api, "/v1/tenants", tenant="*b*")["tenants"]] == [
        "bob",
        "a/b c",
    ]
    assert get(api, "/v1/tenants", queue="celery")["tenants"] == []


def test_turns_of_tenants(
    app: Celery, delayed: Delayed, serve: Callable[..., httpx.Client]
) -> None:
    declare(app, mail=[Fair(weights={LONG: 2})])
    for tenant in ("ada", "bob", LONG):
        send(app, tenant, 3)
    assert len(claim(delayed, 1).records) == 1
    api = serve()
    found = get(api, "/v1/tenants")["tenants"]
    assert sorted(each["turn"] for each in found) == [1, 2, 3]
    assert {each["waits_for"][0]["limit"] for each in found} == {None}
    last = found[[each["turn"] for each in found].index(3)]
    assert (last["tenant"], last["waiting"]) == ("ada", 2)
    long = get(api, f"/v1/tenants/{LONG}")
    assert (long["tenant"], long["waiting"], long["queues"][0]["weight"]) == (LONG, 3, 2.0)


def test_tenants_come_in_pages(
    app: Celery, delayed: Delayed, serve: Callable[..., httpx.Client]
) -> None:
    declare(app, mail=[Fair()], pay=[Limit(concurrency=1, by="tenant")])
    for n in range(12):
        send(app, f"t{n}", 1 + n % 3)
        send(app, f"t{n}", 2, queue="pay")
    claim(delayed, 1)
    claim(delayed, queue="pay")
    api, seen, cursor = serve(), [], None
    while True:
        more = {"cursor": cursor} if cursor else {}
        page = get(api, "/v1/tenants", limit=5, **more)
        assert len(page["tenants"]) <= 5
        seen += [(each["waiting"], each["tenant"], each["queue"]) for each in page["tenants"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert len(seen) == len(set(seen)) == 23
    assert [count for count, _, _ in seen] == sorted((c for c, _, _ in seen), reverse=True)


def test_one_tenant(api: httpx.Client) -> None:
    found = get(api, f"/v1/tenants/{quote('a/b c', safe='')}")
    assert (found["tenant"], found["waiting"]) == ("a/b c", 1)
    assert [each["queue"] for each in found["queues"]] == ["mail"]
    nobody = get(api, "/v1/tenants/nobody")
    assert (nobody["waiting"], nobody["queues"]) == (0, [])


def test_too_much_to_read(
    mail: Celery, serve: Callable[..., httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit_usage, "LANES_LIMIT", 1)
    api = serve()
    assert not get(api, "/v1/tenants")["is_complete"]
    assert not get(api, "/v1/queues/mail/limits")["is_complete"]


# Who sees what.

BOUNDS = [
    ({"tenants": ["ada"]}, {"ada"}),
    ({"tenants": ["ada", "eve"]}, {"ada", "eve"}),
    ({"queues": ["pay"]}, set()),
    ({"queues": ["pay"], "tenants": ["ada"]}, set()),
    ({"queues": ["mail"], "tenants": ["bob"]}, {"bob"}),
]


@pytest.fixture
def as_token(
    mail: Celery, delayed: Delayed, serve: Callable[..., httpx.Client]
) -> Callable[..., Callable[..., httpx.Response]]:
    api, tokens = serve(needs_token=True), Tokens(delayed)

    def made(**bounds: Any) -> Callable[..., httpx.Response]:
        text = tokens.create("test", ["read"], **bounds)[1]
        headers = {"Authorization": f"Bearer {text}"}
        return lambda path, **query: api.get(path, headers=headers, params=query)

    return made


def _id(value: Any) -> str:
    """The order of a set's members is another one in each process."""
    return str(sorted(value) if isinstance(value, set) else value)


@pytest.mark.parametrize(("bounds", "own"), BOUNDS, ids=_id)
def test_a_token_sees_its_own(as_token: Any, bounds: dict[str, Any], own: set[str]) -> None:
    call = as_token(**bounds)
    others = {"ada", "bob", "eve", "a/b c"} - own
    texts = []
    for path in ("/v1/limits", "/v1/tenants", "/v1/queues/mail/limits"):
        answer = call(path)
        assert answer.status_code == (403 if "mail" in path and "pay" in str(bounds) else 200)
        texts.append(answer.text)
    for name in ("all", "host", "tenant"):
        answer = call(f"/v1/queues/mail/limits/{name}")
        assert answer.status_code in (200, 403)
        texts.append(answer.text)
    for text in texts:
        assert not [each for each in others if f'"{each}' in text], text
    assert {each["tenant"] for each in call("/v1/tenants").json()["tenants"]} == own
    for each in others:
        answer = call(f"/v1/tenants/{quote(each, safe='')}")
        bound = bounds.get("tenants")
        assert answer.status_code == (403 if bound and each not in bound else 200), each
        assert answer.json().get("queues", []) == []


def test_a_token_of_a_tenant_learns_nothing_of_the_whole(as_token: Any) -> None:
    call = as_token(tenants=["eve"])
    found = {each["name"]: each for each in call("/v1/limits").json()["limits"]}
    assert (found["all"]["in_use"], found["all"]["capacity"], found["all"]["waiting"]) == (
        *(None, 3),
        2,
    )
    assert (found["tenant"]["keys"], found["tenant"]["in_use"]) == (0, 0)
    assert found["host"]["tokens"] is None
    queue = call("/v1/queues/mail/limits").json()
    assert (queue["waiting"], queue["waiting_for_turn"]) == (2, 0)
    assert len(call("/v1/queues/mail/limits/all").json()["tasks"]) == 2
    assert call("/v1/tenants/eve").json()["waiting"] == 2


def test_a_token_of_a_tenant_sees_what_it_has(as_token: Any) -> None:
    call = as_token(tenants=["ada"])
    (found,) = call("/v1/tenants").json()["tenants"]
    assert found["in_use"] == [{"limit": "tenant", "capacity": 2, "in_use": 1}]
    keys = call("/v1/queues/mail/limits/tenant").json()["page"]
    assert [(each["key"], each["in_use"]) for each in keys] == [("ada", 1)]
