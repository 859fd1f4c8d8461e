"""Spark looks for sources in modules with such names: `format("kombu_delayed")` needs no import."""

from kombu_delayed.spark.source import DefaultSource

__all__ = ["DefaultSource"]
