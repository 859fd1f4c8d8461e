"""Public names: the page, `__all__`, and the imports of guides and examples agree."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import celery
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "python.md"

#: They are for readers who change the code.
INNER = {"contributing", "decisions", "upstream", "reference"}

#: Where imports for the other modules of a package are gathered.
GATHERED = {"kombu_delayed.inspection.doctor", "kombu_delayed.store.store"}

IMPORT = re.compile(
    r"^\s*(?:>>> )?(?:from ((?:celery_ext|kombu_delayed)[\w.]*) import (?:\(([^)]*)\)|(.+))"
    r"|import ((?:celery_ext|kombu_delayed)[\w.]*))",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def public() -> ModuleType:
    spec = importlib.util.spec_from_file_location("public", ROOT / "docs" / "public.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_public_name_is_on_the_page(public: ModuleType) -> None:
    sections = PAGE.read_text(encoding="utf-8").split("\n## `")[1:]
    shown = {each.partition("`")[0]: re.findall(r"^- `(\w+)", each, re.M) for each in sections}
    assert {name: found for name, found in shown.items() if name not in public.OBJECTS} == {
        name: public.names(name) for name in public.MODULES
    }


def test_each_public_name_can_be_imported(public: ModuleType) -> None:
    for module in public.MODULES:
        if module == "celery_ext.django" and not importlib.util.find_spec("django.tasks"):
            continue
        found = import_module(public.PLACES.get(module, module))
        for name in public.names(module):
            assert hasattr(found, name), (module, name)


def test_what_is_not_public_does_not_say_so(public: ModuleType) -> None:
    places = {public.PLACES.get(each, each) for each in public.MODULES if public.names(each)}
    files = (
        each for name in ("celery_ext", "kombu_delayed") for each in (ROOT / name).rglob("*.py")
    )
    said = {
        ".".join(each.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for each in files
        if re.search(r"^__all__\b", each.read_text(encoding="utf-8"), re.M)
    }
    assert said - GATHERED == places


def _pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from (ROOT / "examples").rglob("*.py")
    for path in (ROOT / "docs").rglob("*.md"):
        if path.relative_to(ROOT / "docs").parts[0] not in INNER:
            yield path


def test_guides_and_examples_import_what_is_public(public: ModuleType) -> None:
    imports = 0
    for path in _pages():
        for found in IMPORT.finditer(path.read_text(encoding="utf-8")):
            module, several, given, whole = found.groups()
            imports += 1
            if whole:
                assert whole in public.MODULES, (path, found[0])
                continue
            names = (several or given.partition("#")[0]).split(",")
            for name in (each.split(" as ")[0].strip() for each in names):
                if name:
                    known = public.names(module) if module in public.MODULES else ()
                    assert name in known or f"{module}.{name}" in public.MODULES, (path, found[0])
    assert imports > 30


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("celery_ext.policies", ["NotRun"]),
        ("celery_ext.policies.policy", ["PolicyError"]),
        (
            "celery_ext.errors",
            [
                *("AlreadyExpected", "AnswerFailed", "AnswerTimeout", "AnswersFull", "BackupError"),
                *("BrokerError", "BulkError", "ExpectationError", "QueryError", "StillRunning"),
            ],
        ),
        (
            "kombu_delayed.errors",
            [
                *("AlreadyDelayed", "DelayedError", "EmbeddedServerError", "FormatError"),
                *("LeaseLost", "MessageError", "NodeDown", "NotReplicated", "OptionError"),
                *("ReplicaError", "ServerError", "ServerFull", "ServerNotReady", "UrlError"),
            ],
        ),
        ("kombu_delayed.migrate", ["MigrationRefused"]),
    ],
)
def test_results_name_errors_by_modules_that_stay(module: str, names: list[str]) -> None:
    """Celery stores the module of a task's error: clients of other versions look it up there."""
    for name in names:
        error = getattr(import_module(module), name)
        assert error.__module__ == module
        with celery.Celery(set_as_current=False) as app:
            stored = app.backend.prepare_exception(error("why"), "json")
            assert isinstance(app.backend.exception_to_python(stored), error)
