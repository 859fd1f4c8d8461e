"""The state of a result that waits for an answer."""

from __future__ import annotations

from datetime import datetime

from celery import Celery
from celery.backends.base import DisabledBackend
from celery.states import READY_STATES
from celery.utils.log import get_logger

logger = get_logger(__name__)

#: The state until the answer arrives; the result's `info` has the key, the tenant and the timeout.
EXPECTING = "EXPECTING"


def store_expecting(app: Celery, id: str, key: str, tenant: str | None, until: datetime) -> None:
    """Store the state in the result backend, unless the expectation has already ended."""
    try:
        backend = app.backend
        if isinstance(backend, DisabledBackend) or backend.get_state(id) in READY_STATES:
            return
        info = {"key": key, "tenant": tenant, "until": until.isoformat()}
        backend.store_result(id, info, EXPECTING)
    except Exception as error:  # the expectation itself is in the broker
        logger.warning("Expectation %s is not shown in the result backend: %s", id, error)
