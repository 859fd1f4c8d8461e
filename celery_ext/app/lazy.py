"""Packages whose names are imported when they are used first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def names_of(package: str, modules: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package; `modules` has the names in each, which may be its own."""
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{homes[name]}")
        return getattr(module, name, module)

    return get
