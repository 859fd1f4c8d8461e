"""The app for tests, whose workers are told to end while a task's ack is on its way."""

from __future__ import annotations

import os
import signal
from typing import Any

from celery.worker.request import Request

from kombu_delayed.connection.connection import ServerConnection
from tests.kit.tasks_app import app as app

_acknowledge, _send = Request.acknowledge, ServerConnection._send
_acking: list[Request] = []


def _watched_acknowledge(self: Request) -> None:
    _acking.append(self)
    _acknowledge(self)


def _watched_send(self: ServerConnection, *args: Any, **options: Any) -> None:
    _send(self, *args, **options)
    if _acking:
        _acking.clear()
        os.kill(os.getpid(), signal.SIGQUIT)


Request.acknowledge = _watched_acknowledge
setattr(ServerConnection, _send.__name__, _watched_send)
