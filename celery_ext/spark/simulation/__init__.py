"""How late a load would be, and what it would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import Arrivals, Fleet
    from .run import Simulation, simulate

_HOMES = {
    "Arrivals": "model",
    "Fleet": "model",
    "Simulation": "run",
    "simulate": "run",
}

__all__ = [
    "Arrivals",
    "Fleet",
    "Simulation",
    "simulate",
]


def __getattr__(name: str) -> Any:
    # Spark imports modules of this package in each of its workers: only what they use.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
