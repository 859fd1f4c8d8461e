"""Compares the built site with its Markdown: a page that renders wrongly fails.

python docs/built.py site
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parent
MOST_GROUPS, MOST_PAGES = 6, 8

FENCE = re.compile(r"^\s*(```|~~~)")
RULE = re.compile(r"^\s*\|(\s*:?-+:?\s*\|)+\s*$")
HEADING = re.compile(r"^#{1,6} ")
#: Markdown that is left over in the text of a page.
RAW = re.compile(r"```|~~~|\|\s*---|^#{1,6} |\]\([\w./#-]+\)", re.MULTILINE)


def written(text: str) -> Counter[str]:
    """The headings, tables and blocks of code that a page of Markdown has."""
    found: Counter[str] = Counter()
    fenced = False
    for line in text.splitlines():
        if FENCE.match(line):
            fenced = not fenced
            found["code"] += fenced
        elif not fenced:
            found["heading"] += bool(HEADING.match(line))
            found["table"] += bool(RULE.match(line))
    return found


class Page(HTMLParser):
    """Counts the same in the article of a built page, and collects its text outside of code."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.text: list[str] = []
        self._inside: Counter[str] = Counter()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside[tag] += 1
        if self._inside["article"]:
            self.found["heading"] += bool(re.fullmatch("h[1-6]", tag))
            self.found["table"] += tag == "table"
            self.found["code"] += tag == "div" and "highlight" in (dict(attrs).get("class") or "")

    def handle_endtag(self, tag: str) -> None:
        self._inside[tag] -= 1

    def handle_data(self, data: str) -> None:
        outside = not any(self._inside[tag] for tag in ("pre", "code", "script", "style"))
        if self._inside["article"] and outside:
            self.text.append(data)


def problems(source: str, html: str) -> list[str]:
    """What is wrong with a built page."""
    page, expected = Page(html), written(source)
    found = [
        f"{expected[kind]} of kind {kind} are written, {page.found[kind]} are shown"
        for kind in ("heading", "table", "code")
        if expected[kind] != page.found[kind]
    ]
    return found + [f"raw Markdown: {each[0]!r}" for each in RAW.finditer("".join(page.text))]


def crowded(nav: list[dict[str, list[Any]]]) -> list[str]:
    """Whether the navigation has too many groups, or a group too many pages."""
    found = [f"{len(nav)} groups, at most {MOST_GROUPS}"] if len(nav) > MOST_GROUPS else []
    for group in nav:
        for name, pages in group.items():
            if len(pages) > MOST_PAGES:
                found.append(f"{name}: {len(pages)} pages, at most {MOST_PAGES}")
    return found


def main(site: Path) -> int:
    config = re.sub(r"!!python\S+", "", (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))
    found = [f"mkdocs.yml: {each}" for each in crowded(yaml.safe_load(config)["nav"])]
    pages = 0
    for source in sorted(DOCS.rglob("*.md")):
        name = source.relative_to(DOCS).with_suffix("")
        folder = name.parent if name.name == "index" else name
        html = (site / folder / "index.html").read_text(encoding="utf-8")
        text = source.read_text(encoding="utf-8")
        found += [f"{name}.md: {each}" for each in problems(text, html)]
        pages += 1
    if not (site / "search" / "search_index.json").exists():
        found.append("the site has no search index")
    print("\n".join(found) or f"{pages} pages are rendered as they are written")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
