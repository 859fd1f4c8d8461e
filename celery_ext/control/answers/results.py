"""The state of the result of what waits for an answer."""

from __future__ import annotations

from datetime import datetime

from celery import Celery
from celery.backends.base import DisabledBackend
from celery.states import READY_STATES
from celery.utils.log import get_logger

logger = get_logger(__name__)

#: Until there is an answer; the result's `info` has key, tenant and until when.
EXPECTING = "EXPECTING"


def store_expecting(app: Celery, id: str, key: str, tenant: str | None, until: datetime) -> None:
    """Tell the result backend, unless the expectation has ended already."""
    try:
        backend = app.backend
        if isinstance(backend, DisabledBackend) or backend.get_state(id) in READY_STATES:
            return
        info = {"key": key, "tenant": tenant, "until": until.isoformat()}
        backend.store_result(id, info, EXPECTING)
    except Exception as error:  # the expectation itself is the broker's
        logger.warning("Expectation %s is not shown in the result backend: %s", id, error)
