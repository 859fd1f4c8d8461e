"""Reads pages of the dashboard, and sends their forms, as a browser would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import httpx

from celery_ext.http.auth.tokens import cookie_name

#: Elements that have no end tag.
EMPTY = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "path", "rect"}


@dataclass
class Form:
    """A form, its target, and the fields it sends as it stands, without buttons."""

    action: str
    method: str
    fields: list[tuple[str, str]] = field(default_factory=list)

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key == name]


class Page(HTMLParser):
    """The contents of a page: text, elements with their attributes, forms."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.text = html, ""
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.forms: list[Form] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = {name: value or "" for name, value in attrs}
        self.elements.append((tag, given))
        if tag not in EMPTY:
            self._open.append(tag)
        if tag == "form":
            method = given.get("method", "get")
            self.forms.append(Form(given.get("action", ""), method))
        if tag == "input" and self.forms and "form" in self._open and given.get("name"):
            value = given.get("value", "")
            if given.get("type") != "hidden":  # a line of text
                value = "".join(value.splitlines())
            self.forms[-1].fields.append((given["name"], value))

    def handle_endtag(self, tag: str) -> None:
        while tag in self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [given for name, given in self.elements if name == tag]

    def links(self) -> list[str]:
        return [given["href"] for given in self.all("a") if "href" in given]

    def form(self, action: str) -> Form:
        return next(each for each in self.forms if each.action.endswith(action))


class Visitor:
    """A browser of its own, without scripts."""

    def __init__(self, api: httpx.Client) -> None:
        self.client = httpx.Client(base_url=api.base_url, timeout=15)

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    @property
    def cookie(self) -> str:
        return cookie_name(self.client.base_url.netloc.decode(), "")

    def get(self, path: str, status: int = 200) -> Page:
        answer = self.client.get(path, follow_redirects=True)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return Page(answer.text)

    def csrf(self) -> str:
        """The token that its forms must contain, read from a page with a form."""
        return next(v for form in self.get("/backlog").forms for v in form.values("csrf"))

    def post(self, path: str, data: Any, status: int = 200) -> Page:
        answer = self.client.post(path, data=data, follow_redirects=True)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return Page(answer.text)

    def log_in(self, token: str, target: str = "/") -> Page:
        csrf = self.get("/login").form("/login").values("csrf")[0]
        return self.post("/login", {"csrf": csrf, "token": token, "next": target})


def sent(form: Form, **more: Any) -> dict[str, Any]:
    """The fields a form sends, some of them replaced. Browsers send CR LF for each line break."""
    found: dict[str, Any] = {}
    for name, value in form.fields:
        found.setdefault(name, []).append("\r\n".join(value.split("\n")))
    return {**found, **more}


def all_pages(visitor: Visitor, path: str | None) -> Iterator[Page]:
    """A page and the pages after it."""
    while path:
        page = visitor.get(path)
        yield page
        path = next((a["href"] for a in page.all("a") if a.get("rel") == "next"), None)
