"""Spark imports modules that are called `pyspark_*` and takes the source that they have."""

from kombu_delayed.spark.events import EventSource as DefaultSource

__all__ = ["DefaultSource"]
