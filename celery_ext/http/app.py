"""The ASGI application."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from importlib.resources import files
from typing import Any

from celery import Celery
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..errors import BROKER_FAILS, QueryError
from .api.endpoints import (
    answers,
    bulk,
    bulk_change,
    dead_letters,
    event_stream,
    queues,
    tasks,
)
from .api.endpoints.lists import search
from .api.endpoints.rules import limits, pauses
from .api.openapi import document
from .api.operations import Operation, endpoint
from .auth.rate_limit import WRONG_TOKENS_PER_SECOND, RateLimit
from .callbacks.jobs import register
from .dialects import delayedqueue, later
from .middleware import HEALTH_PATH, OPEN_PATHS, Middleware, own_path
from .options import HttpOptions
from .pages.site import Site
from .problems import Problem, answer, problem_of
from .service.service import Service

OPERATIONS: list[Operation] = [
    *tasks.operations,
    *search.operations,
    *bulk.operations,
    *bulk_change.operations,
    *queues.operations,
    *pauses.operations,
    *limits.operations,
    *dead_letters.operations,
    *event_stream.operations,
    *answers.operations,
    *later.operations,
    *delayedqueue.operations,
]

#: The status that is counted for a request whose client disconnected, as in nginx.
BROKEN_OFF = 499


class Api:
    """An app's backlog over HTTP: an ASGI application, standalone or mounted in another one.

    The API is at `/v1`, pages for people are at `/`.

    Every request needs a token. With `needs_token=False`, the application that mounts it must check
    access. `close` ends its threads and connections; a standalone server calls it.
    """

    def __init__(
        self,
        app: Celery,
        options: HttpOptions | None = None,
        *,
        needs_token: bool = True,
        jobs_only: bool = False,
        hosts: Iterable[str] = (),
    ) -> None:
        app.loader.import_default_modules()
        register(app)
        self.service = Service(app, options, jobs_only)
        rate = self.service.options.rate
        limits = RateLimit(rate), RateLimit(rate or WRONG_TOKENS_PER_SECOND)
        paths = {*OPEN_PATHS, *(each.path for each in OPERATIONS)}
        programs = frozenset(path.split("/")[1] for path in paths)
        site = Site(self.service, needs_token, limits[1], programs)
        inner = Starlette(
            routes=[
                *(_route(self.service, each) for each in OPERATIONS),
                *site.routes,
                Route("/openapi.json", self._openapi),
                Route("/docs", partial(_file, name="serving/docs_page.html", kind="text/html")),
                Route(
                    "/docs.js", partial(_file, name="serving/docs_page.js", kind="text/javascript")
                ),
                Route(HEALTH_PATH, self._health),
            ],
            exception_handlers={**_HANDLERS, HTTPException: partial(_not_routed, site)},
            lifespan=self._lifespan,
        )
        # Behind a proxy that terminates TLS, a redirect would send a client of https to http://.
        inner.router.redirect_slashes = False
        self.middleware = Middleware(inner, self.service, site, limits, needs_token, hosts)
        self._document = lru_cache(maxsize=8)(lambda root: json.dumps(document(OPERATIONS, root)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.middleware(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.close()

    def close(self) -> None:
        """Send accepted tasks, then stop."""
        self.service.close()

    async def _openapi(self, request: Request) -> Response:
        found = self._document(request.scope.get("root_path", ""))
        return Response(found, media_type="application/json")

    async def _health(self, request: Request) -> Response:
        await self.service.together(_check_broker).run(None)
        return PlainTextResponse("ok\n")


def _check_broker(service: Service, probes: Sequence[None]) -> None:
    """For all probes that wait: they have no rate, so they share a call."""
    service.check_broker()


def _route(service: Service, operation: Operation) -> Route:
    path = operation.path
    for name in ("key", "name", "tenant"):  # users choose these, and they may have slashes
        path = path.replace(f"{{{name}}}", f"{{{name}:path}}")
    made = Route(path, endpoint(service, operation), methods=[operation.method])
    # Starlette's `$` ignores a line feed at the end, so that a name would be taken for another one.
    made.path_regex = re.compile(made.path_regex.pattern.removesuffix("$") + r"\Z")
    if operation.method == "GET" and made.methods is not None:
        made.methods.discard("HEAD")
    return made


async def _file(request: Request, name: str, kind: str) -> Response:
    return Response(files(__package__).joinpath(name).read_bytes(), media_type=kind)


async def _failed(request: Request, error: Exception) -> Response:
    return answer(problem_of(error))


async def _not_routed(site: Site, request: Request, error: Any) -> Response:
    if error.status_code == 405:
        error.headers = {"Allow": ", ".join(_methods(request))}
    problem = Problem(error.status_code, error.detail, headers=error.headers)
    path = own_path(request.scope)
    if request.method != "GET" or not site.owns(path, request.scope):
        return answer(problem)
    if error.status_code == 405:
        problem.detail = "this address takes forms only: open the list and choose again"
    else:
        problem.detail = f"there is no page at {path[:100]}"
    return site.page_of(problem, request)


def _methods(request: Request) -> list[str]:
    """All methods of a path; the router reports only those of its first route.

    A name may have slashes, so its route also matches longer paths. Only the matching routes with
    the most slashes count.
    """
    from starlette.routing import Match

    found = [
        each for each in request.app.routes if each.matches(request.scope)[0] is not Match.NONE
    ]
    longest = max(each.path.count("/") for each in found)
    same = [each for each in found if each.path.count("/") == longest]
    return sorted({method for each in same for method in each.methods or ()})


async def _broken_off(request: Request, error: Exception) -> Response:
    """The client disconnected while sending its body. Nobody reads this answer; it is counted."""
    return Response(status_code=BROKEN_OFF)


_HANDLERS: dict[Any, Any] = {
    ClientDisconnect: _broken_off,
    **dict.fromkeys((Problem, QueryError, *BROKER_FAILS, Exception), _failed),
}
