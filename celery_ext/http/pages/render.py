"""Templates, and the formats of counts and times in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from glob import escape
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from celery_ext.tasks.formatting import away, number
from celery_ext.tasks.short_repr import printable
from celery_ext.tasks.times import from_ms
from kombu_delayed.message.durations import length_text
from kombu_delayed.store.calls.shards import label, number_of, queue_of

from ..auth.identity import ANYBODY
from .charts import bars, line
from .visit import View, Visit

THEMES = ("light", "dark")

#: The cookie with the chosen theme.
THEME_COOKIE = "delayed_theme"


def readable(value: Any) -> Any:
    """Text without characters that would disguise it or cannot be sent; empty for None."""
    if value is None:
        return ""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value, kept="\n\t")
    return value


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def moment(at: datetime | int | None) -> Markup:
    """A time, given in UTC or in ms, as how far away it is; the time itself is the title."""
    if at is None:
        return Markup("")
    if isinstance(at, int):
        at = from_ms(at)
    shown = away(at - datetime.now(timezone.utc))
    return Markup('<time datetime="{}" title="{}" data-away>{}</time>').format(
        at.isoformat(timespec="milliseconds"), absolute(at), shown
    )


def absolute(at: datetime | int) -> str:
    found = from_ms(at) if isinstance(at, int) else at
    return f"{found:%Y-%m-%d %H:%M:%S} UTC"


#: The formats of times in UTC. The script of the pages has the same ones for the reader's zone.
FORMS = {"full": "%Y-%m-%d %H:%M:%S UTC", "clock": "%H:%M", "day": "%b %d"}


def zoned(at: datetime | int, form: str = "full") -> Markup:
    """A time, given in UTC or in ms; a browser with scripts shows it in the reader's zone."""
    found = from_ms(at) if isinstance(at, int) else at
    return Markup('<time datetime="{}" data-zone="{}">{}</time>').format(
        found.isoformat(timespec="milliseconds"), form, found.strftime(FORMS[form])
    )


@cache
def _environment() -> Environment:
    """All templates, compiled in advance, so that the first visitor does not wait for that."""
    made = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=readable,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "absolute": absolute,
        "label": label,
        "literal": escape,  # as a pattern that matches only this name
        "moment": moment,
        "number": number,
        "number_of": number_of,
        "queue_of": queue_of,
        "seconds": length_text,
        "shortened": shortened,
        "zoned": zoned,
    }
    parts = made.get_template("parts.html").module
    macros = {name: each for name, each in vars(parts).items() if not name.startswith("_")}
    made.globals |= {"bars": bars, "line": line, **macros}
    for name in made.list_templates():
        made.get_template(name)
    return made


class Renderer:
    """Renders pages from templates. `version` is that of the assets."""

    def __init__(self, views: Sequence[View], needs_login: bool, version: str) -> None:
        self._views, self._needs_login, self._version = views, needs_login, version
        self._environment = _environment()

    def page(self, visit: Visit, template: str, shown: Mapping[str, Any]) -> str:
        return self._environment.get_template(template).render(self._context(visit, shown))

    def live(self, visit: Visit, template: str, shown: Mapping[str, Any]) -> str:
        found = self._environment.get_template(template)
        context = found.new_context(self._context(visit, shown))
        return "".join(found.blocks["live"](context))

    def _context(self, visit: Visit, shown: Mapping[str, Any]) -> dict[str, Any]:
        theme = visit.request.cookies.get(THEME_COOKIE)
        return {
            "view": None,
            "assets": f"{visit.root}/assets/{self._version}",
            "at": datetime.now(timezone.utc),
            "csrf": Markup('<input type="hidden" name="csrf" value="{}">').format(visit.csrf),
            "is_logged_in": self._needs_login and visit.identity is not ANYBODY,
            "menu": [each for each in self._views if each.title and each.may(visit)],
            "query": visit.params(),
            "theme": theme if theme in THEMES else "",
            "url": visit.url,
            **shown,
        }
