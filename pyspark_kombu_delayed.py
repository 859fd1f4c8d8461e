"""Spark looks for sources in modules with such names: `format("kombu_delayed")` needs no import."""

from celery_ext.spark.data_source import DefaultSource

__all__ = ["DefaultSource"]
