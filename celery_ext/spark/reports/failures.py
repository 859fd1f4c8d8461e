"""Tasks that failed, from the records that workers leave in the broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from celery_ext import Delayed
from celery_ext.tasks.times import from_ms

from ..connect import connected
from ..options import BrokerOptions

__all__ = ["by_error", "failures"]

SCHEMA = (
    "queue string, id string, task string, tenant string, error string, message string, "
    "attempt int, worker string, at timestamp"
)


def failures(spark: SparkSession, **options: Any) -> DataFrame:
    """The last 2,000 failures of each queue, one row each.

    `options` say where the broker is. Workers record outcomes if their app calls
    `celery_ext.install`. Raises OptionError, and Kombu's OperationalError.
    """
    with connected(BrokerOptions.parse(options), waits=True) as delayed:
        return spark.createDataFrame([*_rows(delayed)], SCHEMA)


def _rows(delayed: Delayed) -> Iterator[tuple[Any, ...]]:
    for each in delayed.recorded("failed"):
        last = each.failure or each.last
        if last is None:
            continue
        error = last.error or each.state
        yield (
            *(each.queue, each.id, each.task, each.tenant or "", error, last.message or ""),
            *(last.attempt, last.worker or "", from_ms(last.at_ms)),
        )


def by_error(failures: DataFrame) -> DataFrame:
    """Failures by task and error, with the latest message."""
    return failures.groupBy("queue", "task", "error").agg(
        F.count("*").alias("failures"),
        F.max("at").alias("last_at"),
        F.max_by("message", "at").alias("message"),
    )
