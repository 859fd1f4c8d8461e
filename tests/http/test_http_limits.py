"""Limits and tenants over HTTP: usage, waiting tasks, and their visibility."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from celery import Celery

from celery_ext import Delayed
from celery_ext.control.policies import limit_usage
from celery_ext.policies import Drain, Fair, Limit, Message, Run, Running, Shares, Throttler
from tests.kit.gates import claim, declare, mail_policies, send
from tests.kit.http import Serve, all_rows, bearer, pages

LONG = "z" * 150


class Counted(Throttler):
    def decide(self, message: Message, running: Running) -> Run:
        return Run()


@pytest.fixture
def mail(app: Celery, delayed: Delayed) -> Celery:
    """An app with three running mails, one each of ada, bob and a/b c, and eleven waiting."""
    declare(app, mail=mail_policies())
    for tenant, count in (("ada", 6), ("bob", 4), ("a/b c", 2), ("eve", 2)):
        send(app, tenant, count, host=f"{tenant}.example")
    assert len(claim(delayed).records) == 3
    return app


@pytest.fixture
def api(mail: Celery, serve: Serve) -> httpx.Client:
    return serve()


def get(api: httpx.Client, path: str, **query: Any) -> Any:
    answer = api.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def by_name(answer: Any) -> dict[str, Any]:
    return {each["name"]: each for each in answer["limits"]}


def part(row: Any, names: str) -> Any:
    """Some values of a row, or of each row, in this order."""
    if isinstance(row, list):
        return [part(each, names) for each in row]
    found = tuple(row[name] for name in names.split())
    return found if len(found) > 1 else found[0]


def test_limits(api: httpx.Client) -> None:
    found = by_name(get(api, "/v1/limits"))
    assert list(found) == ["all", "host", "tenant"]
    own, host, tenant = found.values()
    assert part(own, "queue kind by declared") == ("mail", "limit", None, True)
    assert part(own, "capacity in_use waiting critical keys busiest") == (3, 3, 11, True, None, [])
    assert own["first_due"] is not None
    assert part(host, "capacity in_use rate burst") == (None, None, "60/h", 2)
    assert part(tenant, "capacity in_use by") == (2, 3, "tenant")
    assert part(tenant["busiest"], "key in_use") == [("a/b c", 1), ("ada", 1), ("bob", 1)]

    assert part(all_rows(api, "/v1/limits", "limits", limit=1), "name") == list(found)
    assert api.get("/v1/limits", params={"cursor": "x"}).status_code == 422
    assert get(api, "/v1/limits", queue="celery")["limits"] == []


def test_one_limit(api: httpx.Client, delayed: Delayed) -> None:
    found = get(api, "/v1/queues/mail/limits/all")
    assert (found["waiting"], found["page"]) == (11, [])
    assert part(found["tasks"], "waiting_for status") == [("the limit all", "waiting")] * 11
    first, *rest = part(found["tasks"], "id")
    assert delayed.cancel(first)
    assert part(get(api, "/v1/queues/mail/limits/all")["tasks"], "id") == rest
    assert api.get("/v1/queues/mail/limits/none").status_code == 404


def test_keys_of_a_limit(app: Celery, delayed: Delayed, serve: Serve) -> None:
    declare(app, mail=[Limit(concurrency=1, rate="1/d", burst=3, by="host")])
    for n in range(6):
        send(app, "ada", n + 1, host=f"host-{n}")
    assert len(claim(delayed).records) == 6
    api, path = serve(), "/v1/queues/mail/limits/host"
    first, second = pages(api, path, "page", limit=4)
    rows = [(f"host-{n}", 1, n, 2.0) for n in (5, 4, 3, 2, 1, 0)]
    assert part([*first, *second], "key in_use waiting tokens") == rows
    found = get(api, path, key="-3")
    assert part(found["page"], "key") == ["host-3"]
    assert part(found, "keys in_use waiting") == (6, 6, 15)


def test_shares_and_drains(app: Celery, delayed: Delayed, serve: Serve) -> None:
    shares = Shares(4, {"ada": 0.5, "bob": 0.25}, by="tenant", borrow=False)
    declare(app, mail=[shares, Drain("5/s", after="5m")], pay=[Shares(4, {"ada": 0.5}), Counted()])
    for tenant in ("ada", "bob", "eve"):
        send(app, tenant, 3)
        send(app, tenant, 3, queue="pay")
    assert len(claim(delayed).records) == len(claim(delayed, queue="pay").records) == 4
    api = serve()
    late, own = get(api, "/v1/limits", queue="mail")["limits"]
    assert part(late, "name kind rate after_seconds") == ("late", "drain", "5/s", 300.0)
    assert part(late, "tokens in_use waiting") == (1.0, None, 0)
    assert part(own, "capacity in_use waiting keys") == (4, 4, 5, None)
    expected = [("ada", 2, 2, 1), ("bob", 1, 1, 2), ("", 1, 1, 2)]
    assert part(own["shares"], "key slots in_use waiting") == expected
    assert len(get(api, "/v1/queues/mail/limits/shares")["tasks"]) == 5
    tasks, tenants, borrowed = get(api, "/v1/limits", queue="pay")["limits"]
    assert part(tasks, "kind capacity in_use") == ("throttler", None, 4)
    assert tenants["name"] == "running tenant"
    assert part(borrowed["shares"], "in_use") == [None, None]
    ada = get(api, "/v1/tenants/ada")
    in_use = dict(part(tenants["busiest"], "key in_use"))
    assert ada["waiting"] == 1 + 3 - in_use["ada"]
    waits = dict(part(ada["queues"], "queue waits_for"))
    assert waits["mail"] == [{"limit": "shares", "key": "ada", "waiting": 1}]


def test_limits_of_a_task(app: Celery, delayed: Delayed, serve: Serve) -> None:
    app.tasks["till.charge"].policies = [Limit(concurrency=1, by="card")]
    app.conf.task_routes = {"till.charge": {"queue": "pay"}}
    declare(app, mail=[Fair()])
    for queue in ("pay", "pay", "mail"):
        app.send_task("till.charge", kwargs={"card": "4711"}, queue=queue)
    api = serve()
    name = "till.charge/card"
    (found,) = get(api, "/v1/limits")["limits"]
    assert part(found, "queue name task") == ("pay", name, "till.charge")
    assert len(claim(delayed, queue="pay").records) == len(claim(delayed).records) == 1
    api.api.service.cache.forget()  # type: ignore[attr-defined]
    assert set(part(get(api, "/v1/limits")["limits"], "queue")) == {"mail", "pay"}
    for path in (name, quote(name, safe="")):
        page = get(api, f"/v1/queues/pay/limits/{path}")["page"]
        assert part(page, "key waiting") == [("4711", 1)]


def test_what_the_app_does_not_declare(
    mail: Celery, delayed: Delayed, shared_api: httpx.Client
) -> None:
    delayed.policies.drop("mail")  # which the first producer of a process has offered
    shared_api.api.service.forget_names()  # type: ignore[attr-defined]
    shared_api.api.service.cache.forget()  # type: ignore[attr-defined]
    found = by_name(get(shared_api, "/v1/limits"))
    assert set(found) == {"all", "tenant"}
    expected = ("undeclared", False, None, 3, 11)
    assert part(found["all"], "kind declared capacity in_use waiting") == expected
    assert get(shared_api, "/v1/tenants")["tenants"] == []


def test_what_runs(app: Celery, delayed: Delayed, serve: Serve) -> None:
    """The counts are those a throttler sees; a token of a tenant sees only its own tasks."""
    declare(app, mail=[Counted(), Limit(concurrency=5, by="host", weight=2)])
    for tenant in ("ada", "eve"):
        send(app, tenant, host=f"{tenant}.example")
    assert len(claim(delayed).records) == 2
    api = serve(needs_token=True)
    headers = bearer(delayed, "read")
    found = api.get("/v1/queues/mail/running", headers=headers).json()
    assert part(found, "queue is_complete") == ("mail", True)
    ada, eve = sorted(found["tasks"], key=lambda each: str(each["tenant"]))
    assert part(ada, "queue task tenant") == ("mail", "till.send_mail", "ada")
    assert part(ada, "worker keys weights") == ("w", {"host": "ada.example"}, {"host": 2})
    assert ada["since"].startswith("20")
    assert api.get(f"/v1/tasks/{ada['id']}", headers=headers).json()["tenant"] == "ada"
    own = api.get("/v1/queues/mail/running", headers=bearer(delayed, "read", tenants=["eve"]))
    assert own.json()["tasks"] == [eve]


def test_tenants(api: httpx.Client) -> None:
    found = get(api, "/v1/tenants")
    assert found["is_complete"]
    expected = [("ada", 5), ("bob", 3), ("eve", 2), ("a/b c", 1)]
    assert part(found["tenants"], "tenant waiting") == expected
    ada = found["tenants"][0]
    assert part(ada, "queue weight turn") == ("mail", 3.0, None)
    assert ada["waits_for"] == [{"limit": "all", "key": None, "waiting": 5}]
    assert ada["in_use"] == [{"limit": "tenant", "capacity": 2, "in_use": 1}]
    some = get(api, "/v1/tenants", tenant="*b*")["tenants"]
    assert part(some, "tenant") == ["bob", "a/b c"]
    assert get(api, "/v1/tenants", queue="celery")["tenants"] == []
    found = get(api, f"/v1/tenants/{quote('a/b c', safe='')}")
    assert part(found, "tenant waiting") == ("a/b c", 1)
    assert part(found["queues"], "queue") == ["mail"]
    assert part(get(api, "/v1/tenants/nobody"), "waiting queues") == (0, [])


def test_turns_of_tenants(app: Celery, delayed: Delayed, serve: Serve) -> None:
    declare(app, mail=[Fair(weights={LONG: 2})])
    for tenant in ("ada", "bob", LONG):
        send(app, tenant, 3)
    assert len(claim(delayed, 1).records) == 1
    api = serve()
    found = sorted(get(api, "/v1/tenants")["tenants"], key=lambda each: each["turn"])
    assert part(found, "turn") == [1, 2, 3]
    assert {each["waits_for"][0]["limit"] for each in found} == {None}
    assert part(found[-1], "tenant waiting") == ("ada", 2)
    long = get(api, f"/v1/tenants/{LONG}")
    assert (*part(long, "tenant waiting"), long["queues"][0]["weight"]) == (LONG, 3, 2.0)


def test_tenants_come_in_pages(app: Celery, delayed: Delayed, serve: Serve) -> None:
    declare(app, mail=[Fair()], pay=[Limit(concurrency=1, by="tenant")])
    for n in range(12):
        send(app, f"t{n}", 1 + n % 3)
        send(app, f"t{n}", 2, queue="pay")
    claim(delayed, 1)
    claim(delayed, queue="pay")
    found = pages(serve(), "/v1/tenants", "tenants", limit=5)
    assert max(map(len, found)) == 5
    seen = part([row for page in found for row in page], "waiting tenant queue")
    assert len(seen) == len(set(seen)) == 23
    assert seen == sorted(seen, key=lambda each: -each[0])


def test_too_much_to_read(mail: Celery, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_usage, "LANES_LIMIT", 1)
    api = serve()
    assert not get(api, "/v1/tenants")["is_complete"]
    assert not get(api, "/v1/queues/mail/limits")["is_complete"]


# Visibility by token.


@pytest.fixture
def as_token(
    mail: Celery, delayed: Delayed, serve: Serve
) -> Callable[..., Callable[..., httpx.Response]]:
    api = serve(needs_token=True)

    def made(**bounds: Any) -> Callable[..., httpx.Response]:
        headers = bearer(delayed, "read", **bounds)
        return lambda path: api.get(path, headers=headers)

    return made


@pytest.mark.parametrize(
    ("tenants", "queues", "own"),
    [
        (["ada"], None, ["ada"]),
        (["ada", "eve"], None, ["ada", "eve"]),
        (None, ["pay"], []),
        (["ada"], ["pay"], []),
        (["bob"], ["mail"], ["bob"]),
    ],
)
def test_a_token_sees_its_own(as_token: Any, tenants: Any, queues: Any, own: list[str]) -> None:
    bounds = {"tenants": tenants, "queues": queues}
    call = as_token(**{name: value for name, value in bounds.items() if value})
    others = {"ada", "bob", "eve", "a/b c"} - {*own}
    of_queue = "/v1/queues/mail/limits"
    assert call(of_queue).status_code == (403 if queues == ["pay"] else 200)
    for path in ("/v1/limits", "/v1/tenants", of_queue, *(f"{of_queue}/{n}" for n in NAMES)):
        answer = call(path)
        assert answer.status_code in (200, 403)
        assert not [each for each in others if f'"{each}' in answer.text], answer.text
    assert sorted(part(call("/v1/tenants").json()["tenants"], "tenant")) == own
    for each in others:
        answer = call(f"/v1/tenants/{quote(each, safe='')}")
        assert answer.status_code == (403 if tenants and each not in tenants else 200), each
        assert answer.json().get("queues", []) == []


NAMES = ("all", "host", "tenant")


def test_a_token_of_a_tenant_learns_nothing_of_the_whole(as_token: Any) -> None:
    call = as_token(tenants=["eve"])
    found = by_name(call("/v1/limits").json())
    assert part(found["all"], "in_use capacity waiting") == (None, 3, 2)
    assert part(found["tenant"], "keys in_use") == (0, 0)
    assert found["host"]["tokens"] is None
    assert part(call("/v1/queues/mail/limits").json(), "waiting waiting_for_turn") == (2, 0)
    assert len(call("/v1/queues/mail/limits/all").json()["tasks"]) == 2
    assert call("/v1/tenants/eve").json()["waiting"] == 2
    call = as_token(tenants=["ada"])
    (own,) = call("/v1/tenants").json()["tenants"]
    assert own["in_use"] == [{"limit": "tenant", "capacity": 2, "in_use": 1}]
    keys = call("/v1/queues/mail/limits/tenant").json()["page"]
    assert part(keys, "key in_use") == [("ada", 1)]


def test_other_numbers(api: httpx.Client) -> None:
    path = "/v1/queues/mail/limits/all"
    body = {"concurrency": 7, "for": "2h", "why": "a sale"}
    answer = api.post(f"{path}/set", json=body)
    assert answer.status_code == 200, answer.text
    names = "capacity declared_capacity overridden set_by set_why"
    assert part(answer.json(), names) == (7, 3, True, "anybody", "a sale")
    assert part(get(api, path), names) == (7, 3, True, "anybody", "a sale")
    assert "7 at once; critical tasks pass" not in api.get("/tenants?queue=mail").text
    assert api.post(f"{path}/set", json={"rate": "1/s"}).status_code == 422
    assert api.post(f"{path}s/set", json=body).status_code == 422
    assert api.post(f"{path}/reset").json() == {"reset": True}
    assert part(get(api, path), "capacity overridden") == (3, False)


def test_a_token_of_one_queue_cannot_change_a_global_limit(
    app: Celery, delayed: Delayed, serve: Serve
) -> None:
    limits = [Limit(name="api", scope="global", concurrency=2), Limit(name="own", concurrency=3)]
    declare(app, mail=limits)
    api = serve(needs_token=True)
    of_mail, of_all = (bearer(delayed, "admin", queues=queues) for queues in (["mail"], []))
    path = "/v1/queues/mail/limits/{}/{}"
    for name, headers, status in [
        ("global%2Fapi", of_mail, 403),
        ("own", of_mail, 200),
        ("global%2Fapi", of_all, 200),
    ]:
        for verb, body in [("set", {"concurrency": 9}), ("reset", None)]:
            answer = api.post(path.format(name, verb), json=body, headers=headers)
            assert answer.status_code == status, answer.text
