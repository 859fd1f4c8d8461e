"""Simulation of a load: how late tasks would be, and what servers and workers they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_ext.app.lazy import names_of

if TYPE_CHECKING:
    from .model import Arrivals, Fleet
    from .run import Simulation, simulate

__all__ = ["Arrivals", "Fleet", "Simulation", "simulate"]

# Lazy, because Spark's workers import modules of this package and need few of them.
__getattr__ = names_of(
    __name__,
    {"model": ["Arrivals", "Fleet"], "run": ["Simulation", "simulate"]},
)
