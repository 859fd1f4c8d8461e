"""Checks of every request: identity, size and speed; and the headers of every answer.

The logs of requests never have a token, a query or a body.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterable
from datetime import datetime, timezone
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import anyio
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import BROKER_FAILS
from .auth.identity import ANYBODY, Identity
from .auth.rate_limit import RateLimit
from .auth.tokens import PREFIX, Tokens
from .pages.site import Site
from .problems import SHOWN, Problem, answer, busy, problem_of
from .service.service import Service

#: How long a body that is too large is read, so that its sender sees the answer.
DRAIN_SECONDS = 2.0

HEALTH_PATH = "/healthz"
#: Paths that need no token: they reveal nothing about tasks.
OPEN_PATHS = frozenset({"/docs", "/docs.js", "/openapi.json", HEALTH_PATH})

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

#: Values that browsers send in Sec-Fetch-Site for requests from pages of other sites.
_OTHER_SITES = frozenset({"cross-site", "same-site"})

#: Headers that proxies add to requests.
_FORWARDED = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host"})

#: Methods that are counted by name, and the name for other methods and unknown paths.
METHODS = frozenset({*_SAFE, "POST", "PUT", "PATCH", "DELETE"})
OTHER = "other"

_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        b"connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'",
    ),
]

audit = logging.getLogger("celery_ext.http.audit")
access = logging.getLogger("celery_ext.http.access")


class Middleware:
    """An ASGI application around the API. `hosts` are the host names that it serves; empty: any.

    `limits` are the rate limits of requests and of wrong tokens.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        site: Site,
        limits: tuple[RateLimit, RateLimit],
        needs_token: bool,
        hosts: Iterable[str] = (),
    ) -> None:
        self._app, self._service, self._site = app, service, site
        self._needs_token = needs_token
        self._hosts = frozenset(name.lower() for name in hosts)
        self.tokens = Tokens(service.delayed)
        self._rate_limit, self._wrong_tokens = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen, began = _Seen(send), time.perf_counter()
        try:
            await self._pass(scope, receive, seen)
        except (Problem, *BROKER_FAILS) as error:
            if seen.status and not isinstance(error, Problem):
                raise
            await self._answer(problem_of(error), scope, receive, seen)
        except asyncio.CancelledError:
            if seen.status or not self._service.closing:
                raise
            await self._answer(busy("the server is shutting down"), scope, receive, seen)
        finally:
            seconds = time.perf_counter() - began
            method = scope["method"] if scope["method"] in METHODS else OTHER
            route = scope.get("delayed.route", OTHER)
            self._service.meter.answered(method, route, seen.status, seconds)
            _log(scope, seen.status, seconds)

    async def _answer(self, problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
        if self._site.owns(own_path(scope), scope):
            await self._site.answer(problem, scope, receive, send)
        else:
            await answer(problem)(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        path = own_path(scope)
        self._check_origin(scope["method"], path, headers)
        identity = await self._identity(scope, headers)
        scope["delayed.identity"] = identity
        scope["delayed.check"] = partial(self._identity, scope, headers)
        if path != HEALTH_PATH and not self._site.is_asset(path):
            self._rate_limit.check(identity.name)
        body = _Body(receive, self._limit(path), self._service.options.body_seconds)
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length) > body.limit:
            await body.refuse(drain=b"expect" not in headers)
        await self._app(scope, body, send)

    def _limit(self, path: str) -> int:
        options = self._service.options
        return options.bulk_bytes if path == "/v1/bulk" else options.body_bytes

    def _check_origin(self, method: str, path: str, headers: dict[bytes, str]) -> None:
        """Raises a Problem for a request to another host, and for one of another site's page.

        Without tokens, a server that has a list of hosts refuses requests through a proxy, too.
        """
        host = headers.get(b"host", "")
        if self._hosts and _name(host) not in self._hosts and path != HEALTH_PATH:
            raise Problem(421, f"this server does not serve the host {host[:100]!r}")
        if self._hosts and not self._needs_token and not _FORWARDED.isdisjoint(headers):
            raise Problem(403, "this request came through a proxy: start the server with --token")
        is_safe = method in _SAFE and not path.startswith("/v1/")  # a poll takes tasks
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        is_of_other = method not in _SAFE and origin is not None and _site_of(origin) != host
        if is_of_other or (not is_safe and site in _OTHER_SITES):
            raise Problem(403, "requests from pages of another site are rejected")

    async def _identity(self, scope: Scope, headers: dict[bytes, str]) -> Identity:
        """The present identity of the caller. Raises a Problem if access is denied."""
        path = own_path(scope)
        kind, _, text = headers.get(b"authorization", "").partition(" ")
        is_open = path in OPEN_PATHS or self._site.is_open(path)
        is_page = self._site.owns(path, scope) and not is_open
        is_shown = is_page or is_open  # even with a wrong token
        is_optional = is_shown or not self._needs_token
        token = None
        # Another one is for the proxy, or for the application that mounts this one.
        if kind.lower() == "bearer" and (not is_optional or text.strip().startswith(PREFIX)):
            is_known, token = self.tokens.known(text.strip())
            if not is_known:
                token = await self._service.threads.run(self.tokens.look, text.strip())
            if token is None and not is_shown:
                client = scope.get("client") or ("",)
                self._wrong_tokens.check(f"wrong tokens from {client[0]}")
                raise _unknown("this token is not known, was revoked or has expired")
        if token is None and is_page:
            return await self._site.identity(HTTPConnection(scope))
        if token is None and not is_optional:
            raise _unknown("a token is needed: Authorization: Bearer …")
        return ANYBODY if token is None else token.identity


def _unknown(detail: str) -> Problem:
    return Problem(401, detail, headers={"WWW-Authenticate": "Bearer"})


def own_path(scope: Scope) -> str:
    """The path relative to where the application is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root) else path


def _site_of(origin: str) -> str | None:
    """Host and port of an origin; None if it is not an origin."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _name(host: str) -> str:
    name, _, port = host.rpartition(":")
    return (name if port.isdigit() and name else host).lower()


class _Seen:
    """Sends an answer with the headers that every answer has, and remembers its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            given = list(message.get("headers", ()))
            names = {name for name, _ in given}
            more = [*_HEADERS, (b"cache-control", b"no-store")]
            message["headers"] = [*given, *(each for each in more if each[0] not in names)]
        await self._send(message)


class _Body:
    """Receives a body that is bounded in size and time."""

    def __init__(self, receive: Receive, limit: int, seconds: float) -> None:
        self._receive, self._seconds = receive, seconds
        self.limit = limit
        self._count = 0
        self._is_read = False
        self._until = time.monotonic() + 10 * seconds

    async def __call__(self) -> Message:
        if self._is_read:
            return await self._receive()
        with anyio.move_on_after(min(self._seconds, self._until - time.monotonic())):
            message = await self._receive()
            self._count += len(message.get("body", b""))
            self._is_read = not message.get("more_body", False)
            if self._count > self.limit:
                await self.refuse()
            return message
        raise Problem(408, "the body arrives too slowly", headers={"Connection": "close"})

    async def refuse(self, drain: bool = True) -> None:
        """Raise a Problem; with `drain`, first give the sender time to send the rest.

        Do not drain for a sender that waits for `100 Continue`: reading would tell it to continue.
        """
        with anyio.move_on_after(DRAIN_SECONDS):
            while drain and not self._is_read:
                message = await self._receive()
                self._is_read = not message.get("more_body", False)
        detail = f"the body is larger than {self.limit} bytes"
        raise Problem(413, detail, headers={"Connection": "close"})


def _log(scope: Scope, status: int, seconds: float) -> None:
    """Log a request: in the audit log if it is an action or was denied, and in the access log."""
    action, target = scope.get("delayed.audit", ("", ""))
    if action or status in (401, 403):
        request = f"{scope['method']} {scope['path'][:SHOWN]}"
        line = {**_who(scope), "action": action or request, "target": target, "status": status}
        audit.info("%s", json.dumps(line), extra={"fields": line})
    if access.isEnabledFor(logging.INFO):
        line = {
            **_who(scope),
            "method": scope["method"],
            "path": scope["path"][:SHOWN],
            "status": status,
            "ms": round(seconds * 1000, 1),
        }
        access.info("%s", json.dumps(line), extra={"fields": line})


def _who(scope: Scope) -> dict[str, Any]:
    identity, client = scope.get("delayed.identity"), scope.get("client") or ("",)
    return {"who": identity.name if identity else "", "from": client[0]}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, and the record's fields or message."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "at": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line.update(fields if fields is not None else {"message": record.getMessage()})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def show_logs(form: str, *, requests: bool) -> None:
    """Write logs to standard error: all in JSON, or those without a handler as text.

    With `requests` each request is logged, not only those that change something or are refused.
    """
    audit.setLevel(logging.INFO)
    access.setLevel(logging.INFO if requests else logging.WARNING)
    root = logging.getLogger()
    if form == "json":
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter())
        root.handlers[:] = [handler]
        root.setLevel(min(root.level, logging.INFO) or logging.INFO)
        return
    if root.handlers:
        return
    for each in (audit, access):
        if not each.handlers:
            handler = logging.StreamHandler()
            name = each.name.rpartition(".")[2]
            handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(message)s"))
            each.addHandler(handler)
            each.propagate = False
    # Python writes warnings of loggers without a handler, but those of Celery and Kombu have one
    # that drops them.
    if logging.lastResort is not None:
        root.addHandler(logging.lastResort)
