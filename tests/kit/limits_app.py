"""The app for workers in tests whose queue lets one task run at a time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_ext import install
from celery_ext.policies import Limit
from tests.kit.ledger import Ledger
from tests.kit.tasks_app import Settings, make_app


def make_limited_app(settings: Settings) -> Celery:
    app = make_app(settings)
    app.conf.update(worker_prefetch_multiplier=1, worker_lost_wait=0.5)
    options = {"delayed_lease_seconds": 1, "delayed_policies": {"celery": [Limit(concurrency=1)]}}
    app.conf.broker_transport_options = {**settings.transport_options, **options}
    install(app)

    @app.task(bind=True, name="hold", shared=False)
    def hold(self: Any, seconds: float, how: str = "") -> None:
        ledger = Ledger(Path(settings.ledger))
        ledger.append(id=self.request.id, at="begin", when=time.time())
        time.sleep(seconds)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        ledger.append(id=self.request.id, at="end", when=time.time())
        if how == "fail":
            raise ValueError("no")

    return app


app = make_limited_app(Settings.from_environment())
