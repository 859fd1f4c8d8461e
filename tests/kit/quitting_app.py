"""The app for tests whose workers are told to end at a moment that their pool does not expect.

That is while an ack of a task is on its way, or while a process's report that a task has
ended is handled.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from celery.concurrency.asynpool import AsynPool
from celery.worker.request import Request

from kombu_delayed.connection.connection import ServerConnection
from tests.kit.tasks_app import app as app

_acknowledge = Request.acknowledge
_on_job_ready = AsynPool.on_job_ready
_acking: list[Request] = []
_told: list[int] = []


def _tell() -> None:
    if not _told:
        _told.append(os.getpid())
        os.kill(os.getpid(), signal.SIGQUIT)


def _tell_on_job_ready(self: AsynPool, *args: Any) -> None:
    _on_job_ready(self, *args)
    _tell()


def _watched_acknowledge(self: Request) -> None:
    _acking.append(self)
    _acknowledge(self)


def _watch(name: str) -> None:
    send = getattr(ServerConnection, name)

    def watched_send(self: ServerConnection, *args: Any) -> None:
        send(self, *args)
        if _acking:
            _acking.clear()
            _tell()

    setattr(ServerConnection, name, watched_send)


AsynPool.on_job_ready = _tell_on_job_ready
Request.acknowledge = _watched_acknowledge
_watch("_send")
_watch("_send_unsent")
