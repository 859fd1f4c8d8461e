"""Imports the names of a package on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def names_of(
    package: str, modules: Mapping[str, Iterable[str]], *, extra: str = ""
) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package. `modules` maps each module to the names in it.

    A name that a module does not define stands for the module itself. If a module needs a package
    that is not installed, the error names the `extra` that brings it.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(f"{package}.{homes[name]}")
        except ModuleNotFoundError as error:
            if not extra:
                raise
            missing = (error.name or "").partition(".")[0]
            raise ModuleNotFoundError(
                f"{package}.{name} needs {missing}: pip install 'kombu-delayed[{extra}]'",
                name=error.name,
            ) from error
        return getattr(module, name, module)

    return get
