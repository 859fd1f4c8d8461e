"""A request for a page, and the definition of pages and forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode

from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response

from kombu_delayed.store.calls.shards import CELERY_OWN

from ..api.operations import Call, Model, validated
from ..auth.tokens import cookie_name
from ..problems import Problem

#: The most fields that a form may have.
FIELDS = 2_000


class Form:
    """The submitted fields of a form; most have one value."""

    def __init__(self, body: bytes) -> None:
        try:
            pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=FIELDS)
        except ValueError:
            raise Problem(400, "the form cannot be read") from None
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name, []).append(value)

    def one(self, name: str) -> str:
        """The value of a field; empty if there is none."""
        return self._values.get(name, [""])[0]

    def all(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def verb(self, verbs: Mapping[str, str]) -> str:
        """The action to take. Raises a Problem if it is none of the verbs."""
        verb = self.one("verb")
        if verb not in verbs:
            raise Problem.of_field("verb", f"it is one of {', '.join(verbs)}")
        return verb

    def given(self, names: list[str]) -> dict[str, str]:
        """Those of some fields that are not empty."""
        return {name: value for name in names if (value := self.one(name))}


class Pages(Protocol):
    """Renders pages from templates."""

    def make(
        self, visit: Visit, template: str, shown: Mapping[str, Any], status: int = 200
    ) -> Response: ...

    def make_live(self, visit: Visit, template: str, shown: Mapping[str, Any]) -> str: ...

    def take_form(self, id: str) -> bool: ...


@dataclass
class Visit(Call):
    """A request for a page. `csrf` is the token that its forms must have."""

    pages: Pages = field(kw_only=True)
    csrf: str = ""

    @property
    def root(self) -> str:
        return str(self.request.scope.get("root_path", "")).rstrip("/")

    @property
    def cookie(self) -> str:
        return cookie_of(self.request)

    def url(self, path: str, **params: Any) -> str:
        given = {name: value for name, value in params.items() if value not in (None, "")}
        query = urlencode(given, errors="replace")
        return f"{self.root}{path}{'?' if query else ''}{query}"

    def params(self) -> dict[str, str]:
        """The query, without empty parameters: these come from empty fields of a form."""
        return {name: value for name, value in self.request.query_params.items() if value}

    def render(self, template: str, shown: Mapping[str, Any], status: int = 200) -> Response:
        return self.pages.make(self, template, shown, status)

    def take(self, form: Form) -> None:
        """Raises a Problem if a form was submitted before: twice would move tasks twice."""
        if (id := form.one("once")) and not self.pages.take_form(id):
            raise Problem(409, "this form was sent before: look at the list for its result")

    def redirect(self, path: str, **params: Any) -> Response:
        return RedirectResponse(self.url(path, **params), 303)

    def queues(self) -> list[str]:
        """The queues that the visitor may see, without those of Celery's remote control."""
        found = self.service.queues(self.identity)
        return [name for name in found if not CELERY_OWN.search(name)]

    def chosen_queues(self, queue: str | None) -> list[str]:
        """One queue, or all that the visitor may see. Raises a Problem for another one."""
        return self.queues() if queue is None else self.service.queues(self.identity, queue)

    def shards(self, queue: str | None = None) -> list[str]:
        shards = self.service.delayed.store.shards
        return [shard for name in self.chosen_queues(queue) for shard in shards.all(name)]


def asked(visit: Visit, model: type[Model]) -> Model:
    """The query as a model. Raises a Problem that names the fields."""
    known = model.model_fields
    return validated(model, {name: v for name, v in visit.params().items() if name in known})


Shown = Mapping[str, Any]


@dataclass(frozen=True)
class View:
    """A page. `look` reads what it shows, and is called in a thread.

    `seconds` is how often an open page is updated; 0: never. `is_whole`: it covers all tenants;
    `is_whole_live`: only its live part does. A page without a title is not in the menu.
    """

    name: str
    path: str
    title: str
    look: Callable[[Visit], Shown]
    seconds: float = 0
    is_whole: bool = False
    is_whole_live: bool = False
    scope: str = "read"

    def may(self, visit: Visit) -> bool:
        return visit.identity.has(self.scope) and not (self.is_whole and visit.identity.tenants)


@dataclass(frozen=True)
class Action:
    """The handling of submitted forms. `act` is called in a thread."""

    path: str
    act: Callable[[Visit, Form], Response]
    scope: str


def cookie_of(visitor: HTTPConnection) -> str:
    root = str(visitor.scope.get("root_path", "")).rstrip("/")
    return cookie_name(visitor.headers.get("host", ""), root)


def set_cookie(visit: Visit, response: Response, secret: str, seconds: int | None = None) -> None:
    request = visit.request
    # Behind a proxy that terminates TLS, only the browser knows the scheme.
    is_https = "https" in (request.url.scheme, request.headers.get("origin", "").partition(":")[0])
    response.set_cookie(
        visit.cookie,
        secret,
        max_age=seconds,
        path=visit.root or "/",
        secure=is_https,
        httponly=True,
        samesite="strict",
    )
