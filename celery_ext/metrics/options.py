"""The options of a worker's metrics."""

from __future__ import annotations

from dataclasses import dataclass

from celery import Celery

from ..app.settings import option, parse

#: The name of the setting in an app's configuration.
SETTING = "delayed_metrics"


@dataclass(frozen=True)
class MetricsOptions:
    """The setting `delayed_metrics` of an app. Raises OptionError if it is invalid."""

    host: str = option(
        "127.0.0.1", "The address on which workers listen; `0.0.0.0`: all. The page needs no token."
    )
    port: int = option(9540, "The port. 0: a free one, which is in the worker's log.", 0, 65_535)
    ports: int = option(
        1,
        "For several workers on one machine: the number of ports to try from `port` on. "
        "Configure all of them in Prometheus.",
        1,
        1_000,
    )
    by_task: bool = option(
        False, "Whether metrics of started and finished tasks have the name of the task as a label."
    )
    backlog: bool = option(
        True,
        "Whether a worker also exposes gauges of the queues that it consumes, with one "
        "cheap call for each shard. With many workers let the HTTP API do it.",
    )

    @classmethod
    def of(cls, app: Celery) -> MetricsOptions | None:
        """The options of an app, or None if nothing is measured."""
        given = app.conf.get(SETTING)
        return parse(cls, SETTING, given) if given is not None else None
