"""The app for tests, with tasks that have policies: for workers that name it."""

from __future__ import annotations

import time
from typing import Any

from celery_ext import install
from celery_ext.policies import Backoff, Timeout
from tests.kit.tasks_app import Settings, make_app, write_down

app = make_app(Settings.from_environment())
app.conf.broker_transport_options = {"delayed_policies": {"celery": [Timeout("4s")]}}
install(app)


@app.task(bind=True, policies=[Backoff([0.05, 0.05])])
def hopeless(self: Any, secret: str) -> None:
    write_down(self)
    raise ValueError("no hope")


@app.task(bind=True, acks_late=True, policies=[Backoff([0.05, 0.05])])
def hopeless_late(self: Any, secret: str) -> None:
    write_down(self)
    raise ValueError("no hope")


@app.task
def endless() -> None:
    time.sleep(60)
