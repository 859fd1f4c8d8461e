"""Reports on the archive of events: numbers, charts, a page, a forecast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_ext.app.lazy import names_of

if TYPE_CHECKING:
    from .queries import (
        bulk_jobs,
        deliveries,
        deliveries_over_time,
        evenness,
        histogram,
        lateness,
        lateness_over_time,
        later_than,
        never_delivered,
        per_worker,
        rates,
        run_times,
        throughput,
        worst,
    )

__all__ = [
    "bulk_jobs",
    "deliveries",
    "deliveries_over_time",
    "evenness",
    "histogram",
    "lateness",
    "lateness_over_time",
    "later_than",
    "never_delivered",
    "per_worker",
    "rates",
    "run_times",
    "throughput",
    "worst",
]

# Lazy, because Spark's workers import modules of this package and need few of them.
__getattr__ = names_of(__name__, {"queries": __all__})
