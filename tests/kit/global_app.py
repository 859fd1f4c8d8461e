"""The app for workers in tests whose queues share one global limit."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_ext import install
from celery_ext.policies import Limit
from tests.kit.ledger import Ledger
from tests.kit.tasks_app import Settings, make_app

QUEUES = ("calls", "mails")
SLOTS = 3


def make_global_app(settings: Settings) -> Celery:
    app = make_app(settings)
    limit = Limit(concurrency=SLOTS, name="provider", scope="global")
    options = {"delayed_policies": {queue: [limit] for queue in QUEUES}}
    app.conf.broker_transport_options = {**settings.transport_options, **options}
    app.conf.worker_prefetch_multiplier = 1
    install(app)

    @app.task(bind=True, name="ask", shared=False)
    def ask(self: Any, seconds: float = 0.0, go: str = "") -> None:
        ledger, queue = Ledger(Path(settings.ledger)), self.request.delivery_info["routing_key"]
        ledger.append(id=self.request.id, at="begin", queue=queue, pid=os.getpid())
        deadline = time.monotonic() + 60
        while go and not os.path.exists(go) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(seconds)
        ledger.append(id=self.request.id, at="end", queue=queue, pid=os.getpid())

    return app


app = make_global_app(Settings.from_environment())
