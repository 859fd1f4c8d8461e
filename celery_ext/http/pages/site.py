"""The pages as a whole: access to them, their forms, their live parts, their errors."""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.resources import files
from typing import Any

from markupsafe import Markup
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from celery_ext.errors import BROKER_FAILS

from ..api.endpoints.event_stream import BEAT_SECONDS, Streamed
from ..auth.identity import ANYBODY, Identity
from ..auth.rate_limit import RateLimit
from ..auth.tokens import Sessions, csrf_of, is_secret, new_secret
from ..problems import Problem, problem_of
from ..service.service import Service
from .render import Renderer
from .views import consumers, overview, partitions, periodic
from .views.login import Login
from .views.results import dead, failures, trends
from .views.rules import policies, tenants
from .views.tasks import backlog, changing, replaying, task
from .visit import Action, Form, View, Visit, cookie_of, set_cookie

VIEWS: list[View] = [
    *overview.VIEWS,
    *failures.VIEWS,
    *trends.VIEWS,
    *backlog.VIEWS,
    *task.VIEWS,
    *dead.VIEWS,
    *tenants.VIEWS,
    *policies.VIEWS,
    *periodic.VIEWS,
    *consumers.VIEWS,
    *partitions.VIEWS,
]
LIVE = [each for each in VIEWS if each.seconds]
ACTIONS: list[Action] = [
    *(*changing.ACTIONS, *replaying.ACTIONS, *policies.ACTIONS, *tenants.ACTIONS, *task.ACTIONS)
]

_ASSETS = {
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "morph.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

_A_YEAR = 31_536_000

#: Shown where a page has not all queues.
NODE_DOWN = Markup(
    '<p class="notice warn">A node of the Cluster does not answer: its queues are missing here.</p>'
)

#: The answer to a link of another site: it opens the address again, then with the cookie.
_OPENED_AGAIN = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>kombu-delayed</title>'
    '<meta http-equiv="refresh" content="0"><a href="">Open the page</a></html>'
)

logger = logging.getLogger(__name__)

Endpoint = Callable[[Visit], Awaitable[Response]]


class Site:
    """All pages. `needs_login`: they need a login with a token.

    `others` has the first parts of the paths that programs call.
    """

    def __init__(
        self, service: Service, needs_login: bool, rate_limit: RateLimit, others: frozenset[str]
    ) -> None:
        self._service, self._needs_login, self._others = service, needs_login, others
        self.sessions = Sessions(service.delayed, service.options.session_seconds)
        folder = files(__package__).joinpath("assets")
        self._assets = {name: folder.joinpath(name).read_bytes() for name in _ASSETS}
        version = sha256(b"".join(self._assets.values())).hexdigest()[:12]
        self._renderer = Renderer(VIEWS, needs_login, version)
        login = Login(self.sessions, service.options.session_seconds, rate_limit)
        self._pages = {
            *(each.path for each in VIEWS),
            *(each.path for each in ACTIONS),
            *(f"/live/{each.name}" for each in LIVE),
        }
        self.routes = [
            *(self._route(each.path, "GET", _shows(each)) for each in VIEWS),
            *(self._route(f"/live/{each.name}", "GET", _streams(each)) for each in LIVE),
            *(self._route(each.path, "POST", self._takes(each)) for each in ACTIONS),
            Route("/assets/{version}/{name}", partial(self._asset, version)),
            *(
                [
                    self._route("/login", "GET", login.ask),
                    self._route("/login", "POST", self._checked(login.begin)),
                    self._route("/logout", "POST", self._checked(login.end)),
                ]
                if needs_login
                else []
            ),
        ]

    def owns(self, path: str, scope: Scope) -> bool:
        """Returns whether errors of a request are shown as pages.

        In a browser also those of mistyped addresses, except where programs have theirs.
        """
        if path in self._pages or path in ("/login", "/logout"):
            return True
        accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
        is_visit = scope["method"] == "GET" and b"text/html" in accepted
        return (
            is_visit
            and path.lstrip("/").split("/")[0] not in self._others
            and not self.is_asset(path)
        )

    def is_asset(self, path: str) -> bool:
        """Returns whether a path is that of a style or script, which each page loads."""
        return path.startswith("/assets/")

    def is_open(self, path: str) -> bool:
        return self.is_asset(path) or path in ("/login", "/logout")

    async def identity(self, visitor: HTTPConnection) -> Identity:
        """The visitor's identity. Raises a Problem if a login is needed."""
        if not self._needs_login:
            return ANYBODY
        secret = visitor.cookies.get(cookie_of(visitor), "")
        is_known, token = self.sessions.known(secret)
        if not is_known:
            token = await self._service.threads.run(self.sessions.look, secret)
        if token is None:
            raise Problem(401, "log in with a token")
        return token.identity

    async def answer(self, problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
        await self.page_of(problem, Request(scope, receive))(scope, receive, send)

    def page_of(self, problem: Problem, request: Request) -> Response:
        """The page that shows a problem of a request."""
        return self._failed(self._visit(request), problem)

    def _visit(self, request: Request) -> Visit:
        identity = request.scope.get("delayed.identity", ANYBODY)
        visit = Visit(self._service, identity, request, pages=self)
        secret = request.cookies.get(visit.cookie, "")
        if not is_secret(secret):
            secret = new_secret()
            request.scope["delayed.new_secret"] = secret
        visit.csrf = csrf_of(secret)
        return visit

    def make(
        self, visit: Visit, template: str, shown: Mapping[str, Any], status: int = 200
    ) -> Response:
        text = self._renderer.page(visit, template, shown)
        # With `no-referrer`, browsers would hide even the origin of the pages' own forms.
        headers = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "same-origin"}
        made = Response(text.encode(errors="replace"), status, headers, media_type="text/html")
        if secret := visit.request.scope.get("delayed.new_secret"):
            set_cookie(visit, made, secret)
        return made

    def make_live(self, visit: Visit, template: str, shown: Mapping[str, Any]) -> str:
        return self._renderer.live(visit, template, shown)

    def take_form(self, id: str) -> bool:
        return self.sessions.take_form(id)

    def _failed(self, visit: Visit, problem: Problem) -> Response:
        request = visit.request
        if problem.status_code == 401 and request.method in ("GET", "HEAD"):
            target = request.url.path[len(visit.root) :]
            if request.url.query:
                target += f"?{request.url.query}"
            if not target.startswith("/live/"):
                if _is_linked_elsewhere(request):
                    return HTMLResponse(_OPENED_AGAIN)
                return visit.redirect("/login", next=target if target != "/" else None)
        is_form = request.method == "POST"
        shown = {"problem": problem, "title": _title(problem), "is_form": is_form}
        made = visit.render("problem.html", shown, problem.status_code)
        made.headers.update(problem.headers or {})
        return made

    def _route(self, path: str, method: str, endpoint: Endpoint) -> Route:
        is_page = method == "GET" and not path.startswith("/live/")

        async def answer(request: Request) -> Response:
            request.scope["delayed.route"] = path
            visit = self._visit(request)
            if is_page and _is_linked_elsewhere(request):
                return HTMLResponse(_OPENED_AGAIN)
            try:
                return await endpoint(visit)
            except Exception as error:
                problem = problem_of(error)
                if problem.status_code == 500:
                    logger.exception("The page %s has failed", path)
                return self._failed(visit, problem)

        made = Route(path, answer, methods=[method])
        if path.startswith("/live/") and made.methods is not None:
            made.methods.discard("HEAD")  # its answer would never end
        return made

    def _checked(self, act: Callable[[Visit, Form], Awaitable[Response]]) -> Endpoint:
        """Accept a form only if it comes from these pages."""

        async def endpoint(visit: Visit) -> Response:
            form = Form(await visit.request.body())
            is_ours = hmac.compare_digest(form.one("csrf").encode(), visit.csrf.encode())
            if not is_ours or "delayed.new_secret" in visit.request.scope:
                raise Problem(403, "this form belongs to another session: open the page again")
            return await act(visit, form)

        return endpoint

    def _takes(self, action: Action) -> Endpoint:
        async def act(visit: Visit, form: Form) -> Response:
            visit.identity.require(action.scope)
            return await visit.run(action.act, visit, form)

        return self._checked(act)

    async def _asset(self, version: str, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _ASSETS:
            raise Problem(404, "there is no such file")
        # While servers are updated one by one, pages of another version ask for files here, too.
        is_same = request.path_params["version"] == version
        lasting = f"public, max-age={_A_YEAR}, immutable"
        headers = {"Cache-Control": lasting if is_same else "no-store"}
        return Response(self._assets[name], 200, headers, media_type=_ASSETS[name])


def _is_linked_elsewhere(request: Request) -> bool:
    """Whether a page of another site leads here, so that the browser has sent no strict cookie.

    A new cookie would replace the one that it has: the visitor would be logged out.
    """
    is_elsewhere = request.headers.get("sec-fetch-site") == "cross-site"
    return is_elsewhere and "delayed.new_secret" in request.scope


_TITLES = {
    401: "Log in first",
    403: "This is not allowed",
    404: "Not found",
    405: "There is no page here",
    409: "Nothing was changed",
    422: "Invalid request",
    429: "Too many requests",
    503: "The server is busy",
}


def _title(problem: Problem) -> str:
    if problem.status_code == 503 and "the broker" in problem.detail:
        return "Redis does not answer"
    return _TITLES.get(problem.status_code, "This did not work")


def _shows(view: View) -> Endpoint:
    async def endpoint(visit: Visit) -> Response:
        _check(view, visit)
        return await visit.run(_rendered, view, visit)

    return endpoint


def _rendered(view: View, visit: Visit) -> Response:
    shown = _shown(view, visit)
    return visit.render(f"{view.name}.html", shown, shown.get("status", 200))


def _shown(view: View, visit: Visit) -> dict[str, Any]:
    """The content of a page, if need be without the nodes of a Cluster that do not answer."""
    missing = Markup()
    try:
        found = view.look(visit)
    except visit.service.errors_of_one_queue:
        if (rest := visit.service.reachable()) is None:
            raise
        found = view.look(replace(visit, service=rest))
        if found.get("status", 200) != 200:  # a task that is not found may be on such a node
            raise
        missing = NODE_DOWN
    return {"view": view, "missing": missing, **found}


def _streams(view: View) -> Endpoint:
    """The live part of a page, as server-sent events."""

    async def endpoint(visit: Visit) -> Response:
        _check(view, visit)
        if view.is_whole_live:
            visit.identity.require_whole()
        visit.service.streams.begin(visit.identity)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        looks = _looks(visit, view)
        return Streamed(visit, looks, headers=headers, media_type="text/event-stream")

    return endpoint


def _check(view: View, visit: Visit) -> None:
    visit.identity.require(view.scope)
    if view.is_whole:
        visit.identity.require_whole()


async def _looks(visit: Visit, view: View) -> AsyncIterator[str]:
    yield "retry: 2000\n\n"
    said_at, before = time.monotonic(), ""
    while await visit.service.pause(view.seconds):
        text = await _look(visit, view)
        if text is None:
            return
        now = time.monotonic()
        if text != before or now - said_at > BEAT_SECONDS:
            said_at, before = now, text
            yield text


async def _look(visit: Visit, view: View) -> str | None:
    """The next event; None: the login has ended."""
    try:
        await visit.check()
        html = await visit.run(_part, visit, view)
    except (Problem, *BROKER_FAILS) as error:
        if isinstance(error, Problem) and error.status_code == 401:
            return None
        detail = error.detail if isinstance(error, Problem) else "Redis does not answer"
        return f"event: trouble\ndata: {json.dumps(detail)}\n\n"
    return f"event: look\ndata: {json.dumps(html)}\n\n"


def _part(visit: Visit, view: View) -> str:
    return visit.pages.make_live(visit, f"{view.name}.html", _shown(view, visit))
