"""What the archive of events says: figures, charts, a page, a forecast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .queries import (
        deliveries,
        evenness,
        histogram,
        lateness,
        later_than,
        never_delivered,
        per_worker,
        rates,
        throughput,
        worst,
    )

_HOMES = {
    "deliveries": "queries",
    "evenness": "queries",
    "histogram": "queries",
    "lateness": "queries",
    "later_than": "queries",
    "never_delivered": "queries",
    "per_worker": "queries",
    "rates": "queries",
    "throughput": "queries",
    "worst": "queries",
}

__all__ = [
    "deliveries",
    "evenness",
    "histogram",
    "lateness",
    "later_than",
    "never_delivered",
    "per_worker",
    "rates",
    "throughput",
    "worst",
]


def __getattr__(name: str) -> Any:
    # Spark imports modules of this package in each of its workers: only what they use.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
