"""What is public in Python: read from the code without importing it, for a page and for a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: The public modules. Their names are those of `__all__`; one without it is imported for what it
#: does.
MODULES = (
    "celery_ext",
    "celery_ext.signals",
    "celery_ext.tracing",
    "celery_ext.policies",
    "celery_ext.control.backup",
    "celery_ext.metrics",
    "celery_ext.http",
    "celery_ext.django",
    "celery_ext.worker.hooks",
    "celery_ext.spark",
    "celery_ext.spark.backup",
    "celery_ext.spark.events",
    "celery_ext.spark.reports",
    "celery_ext.spark.reports.backtest",
    "celery_ext.spark.reports.failures",
    "celery_ext.spark.reports.forecast",
    "celery_ext.spark.simulation",
    "kombu_delayed",
    "kombu_delayed.embedded",
    "kombu_delayed.inspection.events",
    "kombu_delayed.migrate",
    "kombu_delayed.testing",
)

#: Modules that are imported from a package above them -> where they are.
PLACES = {
    "celery_ext.signals": "celery_ext.app.signals",
    "celery_ext.tracing": "celery_ext.worker.tracing",
}

#: What `install` gives an app -> the module and the class whose methods it has.
OBJECTS = {
    "app.delayed": ("celery_ext.control.delayed", "Delayed"),
    "app.delayed.dead": ("celery_ext.control.dead_letters", "Dead"),
    "app.delayed.expectations": ("celery_ext.control.answers.expectations", "Expectations"),
}

#: A longer signature is not shown: the options of `Options` have a page.
LONGEST = 400


def path_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    found = (path / "__init__.py", path.with_suffix(".py"))
    return next((each for each in found if each.exists()), None)


@lru_cache
def _read(module: str) -> tuple[ast.Module, list[str]]:
    path = path_of(module)
    if path is None:
        raise SystemExit(f"there is no module {module}")
    text = path.read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines()


def names(module: str) -> list[str]:
    """The public names of a module."""
    tree, _ = _read(PLACES.get(module, module))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        yield from node.body if isinstance(node, ast.If) else [node]


def find(module: str, name: str) -> tuple[str, ast.AST]:
    """The module that defines a name of a module, and its definition there."""
    tree, _ = _read(module)
    for node in _statements(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return module, node
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in map(ast.unparse, targets):
                return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    source = _source(module, node)
                    if path_of(f"{source}.{alias.name}"):
                        return f"{source}.{alias.name}", _read(f"{source}.{alias.name}")[0]
                    return find(source, alias.name)
    raise SystemExit(f"{module} has no {name}")


def _source(module: str, node: ast.ImportFrom) -> str:
    parts = module.split(".")
    path = path_of(module)
    up = node.level - (path is not None and path.name == "__init__.py")
    above = parts[: len(parts) - up] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def signature(node: ast.AST) -> str:
    """What a function or a class takes."""
    shown = ""
    if isinstance(node, ast.FunctionDef):
        if "property" not in map(ast.unparse, node.decorator_list):
            shown = f"({_arguments(node)})"
        if node.returns:
            shown += f" -> {ast.unparse(node.returns)}"
    elif isinstance(node, ast.ClassDef):
        fields = [each for each in map(_field, node.body) if each]
        if _has_fields(node) and fields:
            shown = f"({', '.join(fields)})"
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                shown = f"({_arguments(each)})"
    return shown if len(shown) <= LONGEST else "(…)"


def _arguments(node: ast.FunctionDef) -> str:
    shown = ast.unparse(node.args).removeprefix("self").removeprefix("cls")
    return shown.removeprefix(", ")


def _has_fields(node: ast.ClassDef) -> bool:
    marks = [*node.decorator_list, *node.bases]
    return any(ast.unparse(each).startswith(("dataclass", "NamedTuple")) for each in marks)


def _field(node: ast.stmt) -> str:
    if not isinstance(node, ast.AnnAssign) or ast.unparse(node.target).startswith("_"):
        return ""
    value, is_made = node.value, False
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        given = {each.arg: each.value for each in value.keywords}
        value, is_made = given.get("default"), "default_factory" in given
    default = " = …" if is_made else f" = {ast.unparse(value)}" if value else ""
    return f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{default}"


def meaning(module: str, node: ast.AST) -> str:
    """The first paragraph of its docstring, or the `#:` comment in front of it."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
        lines = (ast.get_docstring(node) or "").split("\n\n")[0].splitlines()
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        _, source = _read(module)
        lines, at = [], node.lineno - 2
        while source[at].startswith("#:"):
            lines.insert(0, source[at].removeprefix("#: "))
            at -= 1
    return " ".join(lines)


def docstrings() -> Iterator[tuple[str, str]]:
    """Name and docstring of each public name, of the methods of public classes, and of errors."""
    for module in MODULES:
        place = PLACES.get(module, module)
        yield module, ast.get_docstring(_read(place)[0]) or ""
        for name in names(module):
            yield from _documented(f"{module}.{name}", find(place, name)[1])
    for name, (module, kind) in OBJECTS.items():
        yield from _documented(name, find(module, kind)[1])
    for module in ("celery_ext.errors", "kombu_delayed.errors"):
        for node in _read(module)[0].body:
            if isinstance(node, ast.ClassDef):
                yield from _documented(f"{module}.{node.name}", node)


def _documented(name: str, node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        yield name, ast.get_docstring(node) or ""
    for each in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            yield f"{name}.{each.name}", ast.get_docstring(each) or ""


def _line(name: str, module: str, node: ast.AST) -> str:
    told = meaning(module, node)
    return f"- `{name}{signature(node)}`" + (f": {told}" if told else "")


def page() -> Iterator[str]:
    """The lines of the page."""
    for module in MODULES:
        place = PLACES.get(module, module)
        yield f"\n## `{module}`\n"
        told = meaning(place, _read(place)[0])
        yield f"{told}\n" if names(module) else f"{told} Import it for its side effects.\n"
        for name in names(module):
            yield _line(name, *find(place, name))
    for name, (module, kind) in OBJECTS.items():
        yield f"\n## `{name}`\n"
        module, node = find(module, kind)
        yield meaning(module, node) + "\n"
        assert isinstance(node, ast.ClassDef)
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
                yield _line(each.name, module, each)
