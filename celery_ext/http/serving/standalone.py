"""The app of `python -m celery_ext.http`: only HTTP jobs, configured by environment variables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from celery import Celery

from ..callbacks.jobs import register
from ..options import SETTING
from .worker_process import end_with_server

#: Variables with the broker's URL, and the options as JSON; the server sets them for its worker.
BROKER, OPTIONS = "DELAYED_HTTP_BROKER", "DELAYED_HTTP_OPTIONS"

#: The queue of the jobs if no option names another one.
QUEUE = "http-jobs"


def make_app(broker: str, options: Mapping[str, Any]) -> Celery:
    made = Celery("delayed-http", broker=broker, set_as_current=False)
    made.conf.update(
        task_default_queue=options.get("job_queue") or QUEUE,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=True,
        **{SETTING: dict(options)},
    )
    register(made)
    return made


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    end_with_server()
    return make_app(os.environ[BROKER], json.loads(os.environ.get(OPTIONS) or "{}"))
