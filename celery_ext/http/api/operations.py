"""The operations of the API: each declares its input, answers and scope, for routes and docs."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from inspect import iscoroutinefunction
from math import isinf
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from ..auth.identity import ANYBODY, Identity
from ..problems import SHOWN, Problem
from ..service.service import Service

#: The most characters of a trace's state; a longer one is left out.
TRACE_SIZE = 512

_TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


@dataclass
class Call:
    """One request, read and checked."""

    service: Service
    identity: Identity
    request: Request
    query: Any = None
    body: Any = None

    @cached_property
    def trace(self) -> dict[str, str]:
        """The trace that the request belongs to, as headers of its task (W3C Trace Context)."""
        parent = self.request.headers.get("traceparent")
        if parent is None or not _TRACE.fullmatch(parent):
            return {}
        state = self.request.headers.get("tracestate", "")
        more = {"tracestate": state} if 0 < len(state) <= TRACE_SIZE else {}
        return {"traceparent": parent, **more}

    def named(self, name: str) -> str:
        return str(self.request.path_params[name])

    @property
    def id(self) -> str:
        return self.named("id")

    @property
    def queue(self) -> str:
        """The queue in the path. Raises a Problem if the caller may not see it."""
        queue = self.named("queue")
        self.identity.check_queue(queue)
        return queue

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that waits for Redis, in a thread."""
        return await self.service.threads.run(function, *args)

    async def check(self) -> None:
        """Raises a Problem if the token or login of a long request is no longer valid."""
        await self.request.scope["delayed.check"]()

    def note(self, action: str, target: str = "") -> None:
        """Name what this request does, for the audit log."""
        self.request.scope["delayed.audit"] = (action, target[:SHOWN])


Handler = TypeVar("Handler", bound=Callable[[Call], Any])


@dataclass(frozen=True)
class Operation:
    """A method on a path. `scope` is the one that a token needs for it."""

    method: str
    path: str
    handler: Callable[[Call], Any]
    scope: str
    tag: str
    answers: dict[int, Any]
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    body_type: str = "application/json"
    answer_type: str = "application/json"
    problems: tuple[int, ...] = ()
    #: Whether it may occupy its thread for seconds, so that one token may have only half of them.
    is_search: bool = False
    #: Reads the body; None: the handler does.
    read: Callable[[Request, type[BaseModel]], Awaitable[Any]] | None = None

    @property
    def name(self) -> str:
        """A name for the operation, unique among all."""
        return self.handler.__name__

    @property
    def summary(self) -> str:
        return self.handler.__doc__ or ""


class Operations(list[Operation]):
    """The operations of a subject, below a path. `common` are arguments of each of them."""

    def __init__(self, tag: str, path: str = "", **common: Any) -> None:
        super().__init__()
        self._tag, self._path, self._common = tag, path, common

    def add(
        self, method: str, path: str, scope: str, answers: Any, **more: Any
    ) -> Callable[[Handler], Handler]:
        """Register a handler, which returns a response or JSON. Its docstring is the summary.

        A handler that is not a coroutine is called in a thread. `answers` is a model, or one for
        each status.
        """
        if not isinstance(answers, dict):
            answers = {200: answers}
        given = {"read": read_json, **self._common, **more}

        def decorate(handler: Handler) -> Handler:
            whole = self._path + path
            self.append(Operation(method, whole, handler, scope, self._tag, answers, **given))
            return handler

        return decorate


def endpoint(service: Service, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
    """The function that Starlette calls for an operation."""

    async def answer(request: Request) -> Response:
        request.scope["delayed.route"] = operation.path
        identity = request.scope.get("delayed.identity", ANYBODY)
        identity.require(operation.scope)
        call = Call(service, identity, request)
        if operation.query is not None:
            call.query = _query(request, operation.query)
        elif operation.body is not None:
            _refuse_query(request, operation.body)
        if operation.body is not None and operation.read is not None:
            call.body = await operation.read(request, operation.body)
        elif operation.read is read_json and request.method != "GET":
            await _refuse_body(request, operation)
        if iscoroutinefunction(operation.handler):
            found = await operation.handler(call)
        elif operation.is_search:
            with service.searches.place(identity):
                found = await call.run(operation.handler, call)
        else:
            found = await call.run(operation.handler, call)
        return found if isinstance(found, Response) else Json(found)

    return answer


class Json(Response):
    """JSON in ASCII, so that it can show text that is not valid UTF-8."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content).encode()


def _query(request: Request, model: type[BaseModel]) -> Any:
    given: dict[str, Any] = {}
    # Most look-ups have no query: then there is nothing to parse.
    items = request.query_params.multi_items() if request.scope["query_string"] else ()
    for name, value in items:
        if name in given:
            raise Problem.of_field(name[:SHOWN], "it is given twice")
        given[name] = value
    return validated(model, given)


def _refuse_query(request: Request, body: type[BaseModel]) -> None:
    """Raises a Problem for a field of the body in the query, such as a `dry_run` without effect."""
    if body.model_config.get("extra") != "forbid":  # it ignores what it does not know
        return
    known = {field.alias or name for name, field in body.model_fields.items()}
    for name in request.query_params:
        if name in known:
            raise Problem.of_field(name, "it goes into the body")


async def _refuse_body(request: Request, operation: Operation) -> None:
    """Raises a Problem for a body that would be ignored: its sender expects an effect."""
    if (await request.body()).strip() in (b"", b"{}"):
        return
    known = ", ".join(operation.query.model_fields) if operation.query is not None else ""
    instead = f"; its parameters go into the query: {known}" if known else ""
    raise Problem(422, f"this operation takes no body{instead}")


async def read_json(request: Request, model: type[BaseModel]) -> Any:
    """Read the body. Raises a Problem if it does not fit the model."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page of another site can send a form without a preflight request, but no JSON.
    if kind != "application/json" and not kind.endswith("+json"):
        raise Problem(415, "the content type must be application/json")
    return await read_any(request, model)


async def read_any(request: Request, model: type[BaseModel]) -> Any:
    """Read the body as `read_json`, but with any content type or none."""
    return validated(model, parsed(await request.body()))


def parsed(raw: bytes) -> Any:
    """Parse strict JSON. Raises a Problem."""
    try:
        return _decode(raw.decode())
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Problem(400, f"the body is not JSON: {reason}"[:SHOWN]) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _number(text: str) -> float:
    """Read a number with a fraction or exponent. Raises ValueError if it would be Infinity."""
    found = float(text)
    if isinf(found):
        raise ValueError(f"{text[:40]} is too large")
    return found


# json.dumps and json.loads would create a new encoder or decoder for each text.
encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_number).decode


def validated(model: type[Model], given: Any) -> Model:
    """Validate input with a model. Raises a Problem that names the fields."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        errors = [_field_error(each) for each in error.errors(include_url=False)[:20]]
        shown = "; ".join(f"{name}: {detail}" for name, detail in errors[:3])
        raise Problem(422, shown, errors=errors) from None
    except RecursionError:
        raise Problem(422, "the body is nested too deeply") from None


def _field_error(error: Any) -> tuple[str, str]:
    path = ".".join(str(part) for part in error["loc"])[:SHOWN]
    detail = error["msg"].removeprefix("Value error, ")[:SHOWN]
    if not path and ": " in detail:  # a rule about several fields names one of them
        path, _, detail = detail.partition(": ")
    return path or "body", detail


def all_paths(operations: Iterable[Operation]) -> dict[str, list[Operation]]:
    found: dict[str, list[Operation]] = {}
    for operation in operations:
        found.setdefault(operation.path, []).append(operation)
    return found
