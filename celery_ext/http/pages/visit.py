"""One request of a page, and what pages are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode

from pydantic import BaseModel
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response

from kombu_delayed.store.calls.shards import CELERY_OWN

from ..api.operations import Call, validated
from ..auth.sessions import cookie_name
from ..problems import Problem

#: Fields of a form that are read.
FIELDS = 2_000


class Form:
    """What a form has sent; of most fields there is one."""

    def __init__(self, body: bytes) -> None:
        try:
            pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=FIELDS)
        except ValueError:
            raise Problem(400, "the form cannot be read") from None
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name, []).append(value)

    def one(self, name: str) -> str:
        """The value of a field; empty where there is none."""
        return self._values.get(name, [""])[0]

    def all(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def verb(self, verbs: Mapping[str, str]) -> str:
        """What is to be done. Raises Problem for what is none of the verbs."""
        verb = self.one("verb")
        if verb not in verbs:
            raise Problem.of_field("verb", f"it is one of {', '.join(verbs)}")
        return verb

    def given(self, names: list[str]) -> dict[str, str]:
        """Those of these fields that say something."""
        return {name: value for name in names if (value := self.one(name))}


class Pages(Protocol):
    """What makes pages of templates."""

    def make(
        self, visit: Visit, template: str, shown: Mapping[str, Any], status: int = 200
    ) -> Response: ...

    def make_live(self, visit: Visit, template: str, shown: Mapping[str, Any]) -> str: ...

    def take_form(self, id: str) -> bool: ...


@dataclass
class Visit(Call):
    """A request of a page. `csrf` is what its forms must have."""

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
        """What the query says; an empty field of a form says nothing."""
        return {name: value for name, value in self.request.query_params.items() if value}

    def render(self, template: str, shown: Mapping[str, Any], status: int = 200) -> Response:
        return self.pages.make(self, template, shown, status)

    def take(self, form: Form) -> None:
        """Raises a Problem for a form that was sent before: twice would move tasks twice."""
        if (id := form.one("once")) and not self.pages.take_form(id):
            raise Problem(409, "this form was sent before, and done: look at the result")

    def redirect(self, path: str, **params: Any) -> Response:
        return RedirectResponse(self.url(path, **params), 303)

    def queues(self) -> list[str]:
        """The queues that are the visitor's, without those of Celery's remote control."""
        found = self.service.queues(self.identity)
        return [name for name in found if not CELERY_OWN.search(name)]

    def chosen_queues(self, queue: str | None) -> list[str]:
        """One queue, or all that are the visitor's. Raises a Problem for one that is not."""
        return self.queues() if queue is None else self.service.queues(self.identity, queue)

    def shards(self, queue: str | None = None) -> list[str]:
        shards = self.service.delayed.store.shards
        return [shard for name in self.chosen_queues(queue) for shard in shards.all(name)]


def asked(visit: Visit, model: type[BaseModel]) -> Any:
    """The query as a model. Raises a Problem that names the fields."""
    known = model.model_fields
    return validated(model, {name: v for name, v in visit.params().items() if name in known})


Shown = Mapping[str, Any]


@dataclass(frozen=True)
class View:
    """A page that shows something. `look` is called in a thread.

    `seconds` is how often it is looked at anew while somebody watches; 0: never. `is_whole` is
    about all tenants, `is_whole_live` in what is live only. One without a title is not in the menu.
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
    """A form that is sent. `act` is called in a thread."""

    path: str
    act: Callable[[Visit, Form], Response]
    scope: str


def cookie_of(visitor: HTTPConnection) -> str:
    root = str(visitor.scope.get("root_path", "")).rstrip("/")
    return cookie_name(visitor.headers.get("host", ""), root)


def set_cookie(visit: Visit, response: Response, secret: str, seconds: int | None = None) -> None:
    request = visit.request
    # Behind a proxy that speaks TLS, only the browser knows.
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
