"""The API in a user's own ASGI application."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from celery import Celery
from starlette.applications import Starlette
from starlette.routing import Mount

from celery_ext.http import Api, HttpOptions
from kombu_delayed.errors import OptionError


class Caller:
    """Calls an application that runs in no server."""

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


def test_mounted_needs_a_token(app: Celery) -> None:
    api = Api(app)
    call = Caller(api)
    assert call("GET", "/delayed/v1/tasks").status_code == 401
    assert call("GET", "/delayed/docs").status_code == 200
    api.close()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"thread": 1}, "did you mean 'threads'"),
        ({"zzz": 1}, "there are tasks, "),
        ({"threads": 0}, "1 to 256, not 0"),
        ({"threads": 1.5}, "whole number, not 1.5"),
        ({"rate": "1"}, "number, not '1'"),
        ({"tasks": "till.*"}, "list of texts"),
        ({"tasks": [1]}, "list of texts"),
        ({"job_queue": 1}, "text, not 1"),
        (["threads"], "dict of options"),
    ],
)
def test_options(given: object, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        HttpOptions.parse(given)


def test_options_of_an_app(app: Celery) -> None:
    app.conf.delayed_http = {"threads": 3, "tasks": ["till.*"]}
    found = HttpOptions.of(app)
    assert (found.threads, found.tasks) == (3, ("till.*",))
    assert HttpOptions.of(Celery("x", set_as_current=False)) == HttpOptions()


def test_allowed_tasks(app: Celery) -> None:
    api = Api(app, HttpOptions(tasks=("till.*", "*")), needs_token=False)
    allowed = {name: api.service.may_schedule(name) for name in ("till.any", "celery.chord", "x")}
    assert allowed == {"till.any": True, "celery.chord": False, "x": True}
    api.close()
