"""The app for workers in tests, with tasks that have policies."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from celery_ext import install
from celery_ext.policies import Backoff, Timeout
from tests.kit.tasks_app import Settings, make_app, write_down

app = make_app(Settings.from_environment())
app.conf.broker_transport_options = {"delayed_policies": {"timed": [Timeout("4s")]}}
install(app)


@app.task(bind=True, policies=[Backoff([0.05, 0.05])])
def hopeless(self: Any, secret: str) -> None:
    write_down(self)
    raise ValueError("no hope")


@app.task(bind=True, acks_late=True, policies=[Backoff([0.05, 0.05])])
def hopeless_late(self: Any, secret: str) -> None:
    write_down(self)
    raise ValueError("no hope")


@app.task(
    bind=True, acks_late=True, acks_on_failure_or_timeout=False, policies=[Backoff([0.05, 0.05])]
)
def hopeless_kept(self: Any, secret: str) -> None:
    write_down(self)
    raise ValueError("no hope")


class OwnPickle(Exception):
    """Its pickle leaves attributes out, like that of botocore's errors."""

    def __reduce__(self) -> Any:
        return OwnPickle, self.args


class NoPickle(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.stays_here = lambda: None


@app.task(acks_late=True, acks_on_failure_or_timeout=False, policies=[Backoff([0.05])])
def hopeless_pickle(name: str) -> None:
    raise globals()[name]("no hope")


@app.task(bind=True, time_limit=0.5, policies=[Backoff([0.05])])
def endless_once(self: Any) -> int:
    if not self.request.retries:
        time.sleep(60)
    return 7


@app.task
def endless() -> None:
    time.sleep(60)


def endless_again(self: Any) -> None:
    write_down(self)
    time.sleep(60)


def killed(self: Any) -> None:
    write_down(self)
    os.kill(os.getpid(), signal.SIGKILL)


WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "_late": {"acks_late": True},
    "_kept": {"acks_late": True, "acks_on_failure_or_timeout": False},
}

for function, options in ((endless_again, {"time_limit": 0.5}), (killed, {})):
    for suffix, way in WAYS.items():
        app.task(
            bind=True,
            name=f"{__name__}.{function.__name__}{suffix}",
            policies=[Backoff([0.05, 0.05])],
            **options,
            **way,
        )(function)
