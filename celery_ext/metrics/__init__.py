"""Prometheus metrics of workers, of the HTTP API and of processes that send tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..app.lazy import names_of

if TYPE_CHECKING:
    from .measuring import measure
    from .options import MetricsOptions

__all__ = ["MetricsOptions", "measure"]

# Workers read the options, but need prometheus_client only if something is measured.
__getattr__ = names_of(
    __name__, {"measuring": ["measure"], "options": ["MetricsOptions"]}, extra="metrics"
)
