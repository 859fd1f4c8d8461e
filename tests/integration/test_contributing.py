"""Everything that the pages for contributors name exists, and their examples work."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from celery import Celery
from jinja2 import ChoiceLoader, DictLoader

import kombu_delayed.store.calls.scripts as scripts
from celery_ext import Delayed
from celery_ext.http.pages import render, site, views
from celery_ext.policies import Policy, PolicyError
from kombu_delayed.store.calls import caller
from kombu_delayed.store.store import Store
from tests.kit.http import api_client, make_app
from tests.kit.pages import Visitor
from tests.kit.policed import OpenApp
from tests.kit.servers import Server
from tests.kit.state import entry

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
LUA = ROOT / "kombu_delayed" / "store" / "lua"
PAGES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs" / "architecture.md",
    *sorted((ROOT / "docs" / "contributing").glob("*.md")),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
]
BLOCK = re.compile(r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
TOP = {"celery_ext", "docs", "examples", "kombu_delayed", "tests", ".ci"}

#: Files that the walk-throughs write.
NEW = {
    "celery_ext/http/pages/templates/events.html",
    "celery_ext/http/pages/views/events.py",
    "celery_ext/policies/times/deliveries.py",
    "kombu_delayed/store/lua/first_due.lua",
    "tests/lua/test_first_due.py",
}


def words(page: Path) -> list[str]:
    """All words in the commands and names of a page."""
    text = page.read_text(encoding="utf-8")
    blocks = [body for language, _, body in BLOCK.findall(text) if language == "console"]
    return [word for code in [*CODE.findall(BLOCK.sub("", text)), *blocks] for word in code.split()]


def exists(word: str) -> bool:
    if word.partition("/")[0] in TOP and "/" in word:
        return word in NEW or (ROOT / word).exists()
    if re.fullmatch(r"\w+\.lua", word):
        return any(LUA.rglob(word))
    if re.fullmatch(r"(celery_ext|kombu_delayed)(\.\w+)+", word):
        try:
            resolve_name(word)
        except (ImportError, AttributeError):
            return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_modules_are_there(page: Path) -> None:
    assert [word for word in words(page) if not exists(word)] == []


def test_the_code_behind_each_step_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    places = {}
    for names, paths in re.findall(r"^\| (`[A-Z]\w+`.*?) \| (`kombu_delayed/.*?) \|$", text, re.M):
        places.update(zip(CODE.findall(names), CODE.findall(paths), strict=True))
    steps = re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
    assert len(steps) > 10
    for name, method in steps:
        module = places[name].removesuffix(".py").replace("/", ".")
        assert callable(getattr(resolve_name(f"{module}.{name}"), method))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_are_there(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:`|\$ )make ([a-z-]+)", page.read_text(encoding="utf-8"))
    assert set(named) <= set(targets)


def examples(page: str) -> dict[str, str]:
    """The examples of a page, by their titles or languages."""
    text = (ROOT / "docs" / "contributing" / page).read_text(encoding="utf-8")
    return {title or language: body for language, title, body in BLOCK.findall(text)}


def execute(source: str, **names: Any) -> dict[str, Any]:
    exec(compile(f"from __future__ import annotations\n{source}", "<page>", "exec"), names)
    return names


def test_a_test_of_ones_own(store: Store) -> None:
    execute(examples("index.md")["the clock"], entry=entry)["test_what_is_due_is_delivered"](store)


def test_a_script(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    found = examples("lua-script.md")
    example = scripts.Script("first_due", found["lua"])
    known = {"first_due": example}
    monkeypatch.setattr(caller, "script", lambda name: known.get(name) or scripts.script(name))
    method = execute(found["the method"])
    monkeypatch.setattr(Store, "first_due_ms", method["first_due_ms"], raising=False)
    execute(found["the test"])["test_first_due"](store)
    assert found["lua"].startswith("-- first_due: ")
    assert "\n-- returns " in found["lua"]


@pytest.fixture
def add_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Write a module with this text at a place in a package."""

    def add_module(name: str, source: str) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module)["__package__"] = name.rpartition(".")[0]
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, name, "exec"), vars(module))
        return module

    return add_module


def test_a_policy(open_app: OpenApp, add_module: Callable[..., types.ModuleType]) -> None:
    found = examples("policy.md")
    made = add_module("celery_ext.policies.times.deliveries", found["the policy"]).MaxDeliveries
    assert issubclass(made, Policy)
    names = {"MaxDeliveries": made, "PolicyError": PolicyError, "pytest": pytest}
    tests = execute(found["the test"], **names)
    tests["test_max_deliveries_buries"](open_app)
    for count in (0, "3"):
        tests["test_max_deliveries_takes_a_count"](count)


def test_a_page(
    server: Server, add_module: Callable[..., types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = examples("dashboard-page.md")
    made = add_module(f"{views.__name__}.events", found["the view"])
    environment = render._environment()
    loader = ChoiceLoader([environment.loader, DictLoader({"events.html": found["html"]})])
    monkeypatch.setattr(environment, "loader", loader)
    monkeypatch.setattr(site, "VIEWS", [*site.VIEWS, *made.VIEWS])
    monkeypatch.setattr(site, "LIVE", [*site.LIVE, *made.VIEWS])
    app: Celery
    with make_app(server.url) as app, api_client(app) as api, Visitor(api) as visitor:
        assert "Nothing has happened yet" in visitor.get("/events").text
        delayed = Delayed(app)
        execute(found["the test"])["test_events"](visitor, delayed)
        delayed.close()
