"""Boot steps that measure a worker and serve its metrics."""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.exceptions import ImproperlyConfigured
from celery.utils.log import get_logger

from ..control.delayed import Delayed
from ..metrics.options import SETTING, MetricsOptions
from .bootsteps import POOLED_REQUEST, REQUEST, OwnRequests

logger = get_logger(__name__)

_MEASURED = {
    REQUEST: "celery_ext.worker.requests.measured_requests:MeasuredRequest",
    POOLED_REQUEST: "celery_ext.worker.requests.measured_requests:MeasuredPooledRequest",
}


class Exporter(bootsteps.StartStopStep):
    """Serves a worker's metrics while it runs."""

    def create(self, parent: Any) -> Any:
        """Start to measure. Raises ImproperlyConfigured if a package that it needs is missing."""
        try:
            from ..metrics.measuring import measure
        except ModuleNotFoundError as error:
            raise ImproperlyConfigured(
                f"the setting {SETTING} needs {error.name}: pip install 'kombu-delayed[metrics]'"
            ) from error
        options = MetricsOptions.of(parent.app) or MetricsOptions()
        self._meter = measure(by_task=options.by_task)
        self._options, self._delayed = options, Delayed(parent.app)
        self._server: Any = None
        return self

    def start(self, parent: Any) -> None:
        from ..metrics.server import first_free

        options = self._options
        self._server = first_free(options.host, options.port, options.ports, self._page(parent.app))
        if self._server is not None:
            self._server.start()
            logger.info("Metrics are at %s", self._server.url)

    def _page(self, app: Any) -> Any:
        from ..app.queues import own_queues
        from ..metrics.measuring import shown
        from ..metrics.queues import registry_of

        def names() -> list[str]:
            return [name for name in own_queues(app) if name in app.amqp.queues.consume_from]

        queues = registry_of(self._delayed, names)
        others = (queues,) if self._options.backlog else ()
        return lambda: shown(self._meter.registry, *others)

    def stop(self, parent: Any) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()
            self._delayed.close()

    terminate = stop


class MeasuredRequests(bootsteps.Step):
    """Replaces our requests of tasks by requests that are counted."""

    requires = (OwnRequests,)

    def create(self, parent: Any) -> None:
        for task in parent.app.tasks.values():
            task.Request = _MEASURED.get(task.Request, task.Request)
