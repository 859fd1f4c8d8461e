"""Spark imports modules that are called `pyspark_*` and takes the source that they have."""

from celery_ext.spark.events.stream import EventSource as DefaultSource

__all__ = ["DefaultSource"]
