"""Metrics for Prometheus, of workers, of the HTTP API and of any process that sends tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .measuring import measure
    from .options import MetricsOptions

_HOMES = {"MetricsOptions": "options", "measure": "measuring"}

__all__ = ["MetricsOptions", "measure"]


def __getattr__(name: str) -> Any:
    # Workers look at the options: prometheus_client is only needed where something is measured.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
