"""The API in a user's own ASGI application, its options, and its OpenAPI document."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from typing import Any

import httpx
import pytest
import schemathesis
from celery import Celery
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from starlette.applications import Starlette
from starlette.routing import Mount

from celery_ext.http import Api, HttpOptions
from celery_ext.http.api.openapi import document
from celery_ext.http.app import OPERATIONS
from celery_ext.http.serving.server import make_server
from kombu_delayed.errors import OptionError
from tests.kit.wait import wait_until


class Caller:
    """Calls an application without a server."""

    def __init__(self, api: Api) -> None:
        self._transport = httpx.ASGITransport(Starlette(routes=[Mount("/delayed", api)]))

    def __call__(self, method: str, path: str, **given: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://x") as client:
                return await client.request(method, path, **given)

        return asyncio.run(call())


def test_mounted(app: Celery) -> None:
    api = Api(app, needs_token=False)
    call = Caller(api)
    made = call("POST", "/delayed/v1/tasks", json={"task": "till.charge", "delay": "1h"})
    assert made.headers["location"] == f"/delayed/v1/tasks/{made.json()['id']}"
    assert call("GET", made.headers["location"]).json()["status"] == "scheduled"
    bulk = {"content-type": "application/x-ndjson"}
    assert call("POST", "/delayed/v1/bulk", content=b"\n" * (2 << 20), headers=bulk).is_success
    assert call("GET", "/delayed/openapi.json").json()["servers"] == [{"url": "/delayed"}]
    assert call("GET", "/delayed/docs").status_code == 200
    api.close()
    late = call("POST", "/delayed/v1/tasks", json={"task": "till.charge"})
    assert late.status_code == 503
    assert call("GET", "/delayed/v1/tasks").status_code == 503


OTHERS = ["Basic YWRhOng=", "Bearer eyJhbGciOiJIUzI1NiJ9.e30.x", "Negotiate YII="]


@pytest.mark.parametrize("other", OTHERS)
def test_an_authorization_of_the_application_around_it(app: Celery, other: str) -> None:
    api = Api(app, needs_token=False)
    call, headers = Caller(api), {"Authorization": other}
    for path in ("/", "/backlog", "/docs", "/healthz", "/v1/queues"):
        assert call("GET", f"/delayed{path}", headers=headers).status_code == 200, path
    wrong = {"Authorization": "Bearer kd_x"}
    assert call("GET", "/delayed/v1/queues", headers=wrong).status_code == 401
    api.close()


def test_mounted_needs_a_token(app: Celery) -> None:
    api = Api(app)
    assert Caller(api)("GET", "/delayed/v1/tasks").status_code == 401
    api.close()


def test_options_of_an_app(app: Celery) -> None:
    app.conf.delayed_http = {"threads": 3, "tasks": ["till.*"]}
    found = HttpOptions.of(app)
    assert (found.threads, found.tasks) == (3, ("till.*",))
    assert HttpOptions.of(Celery("x", set_as_current=False)) == HttpOptions()
    with pytest.raises(OptionError, match="did you mean 'threads'"):
        HttpOptions.parse({"thread": 1})
    for no_list in (None, 7, "a", ["a", ""]):
        with pytest.raises(OptionError, match=r"'callback_secrets'\] takes a list of texts"):
            HttpOptions.parse({"callback_secrets": no_list})


def test_allowed_tasks(app: Celery) -> None:
    api = Api(app, HttpOptions(tasks=("till.*", "*")), needs_token=False)
    allowed = {name: api.service.may_schedule(name) for name in ("till.any", "celery.chord", "x")}
    assert allowed == {"till.any": True, "celery.chord": False, "x": True}
    api.close()


schema = schemathesis.openapi.from_dict(document(OPERATIONS)).exclude(
    path=["/v1/events", "/v1/bulk"]
)

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]


@schema.parametrize()
@settings(
    max_examples=8,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_schemathesis(case: Any, api: httpx.Client) -> None:
    if case.path.endswith("/poll"):
        case.query = {**(case.query or {}), "wait": 0}
    case.call_and_validate(base_url=str(api.base_url), checks=CHECKS)


def test_parameters_of_status() -> None:
    paths = document(OPERATIONS)["paths"]
    names = {each["name"] for each in paths["/v1/delayedqueue/status"]["get"]["parameters"]}
    assert names == {"id", "namespace"}


@pytest.mark.parametrize("path", ["/v1/tasks/", "/openapi.json/", "/backlog/"])
def test_a_slash_too_many_leads_nowhere_else(api: httpx.Client, path: str) -> None:
    """A proxy may have ended TLS: after a redirect the token would travel unencrypted."""
    for method in ("GET", "POST"):
        found = api.request(method, path)
        assert found.status_code == 404
        assert found.json()["status"] == 404


def test_docs_need_no_internet(api: httpx.Client) -> None:
    page, script = api.get("/docs"), api.get("/docs.js")
    assert page.headers["content-type"].startswith("text/html")
    assert script.headers["content-type"].startswith("text/javascript")
    for text in (page.text, script.text):
        assert "//" not in re.sub(r"^// .*$", "", text, flags=re.MULTILINE)
        assert "innerHTML" not in text


def test_a_client_that_breaks_off_is_no_error(
    api: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def count() -> int:
        lines = api.get("/metrics").text.splitlines()
        found = [each for each in lines if "http_requests_total" in each and '"499"' in each]
        return sum(int(float(each.rpartition(" ")[2])) for each in found)

    before = count()
    url = api.base_url
    with socket.create_connection((url.host, url.port or 80)) as client:
        client.sendall(
            b"PUT /v1/tasks/broken HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
    wait_until(lambda: count() > before, "it is counted")
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_a_proxy_closes_its_idle_connections_first(app: Celery) -> None:
    """Otherwise a request that it sends meanwhile fails: nginx and load balancers wait for 60 s."""
    api = Api(app)
    try:
        assert make_server(api, "127.0.0.1", 0).config.timeout_keep_alive > 60
    finally:
        api.close()
