"""The app for tests, whose workers are told to end while a task's ack is on its way."""

from __future__ import annotations

import os
import signal
from typing import Any

from celery.worker.request import Request

from kombu_delayed.connection.connection import ServerConnection
from tests.kit.tasks_app import app as app

_acknowledge = Request.acknowledge
_acking: list[Request] = []


def _watched_acknowledge(self: Request) -> None:
    _acking.append(self)
    _acknowledge(self)


def _watch(name: str) -> None:
    send = getattr(ServerConnection, name)

    def watched_send(self: ServerConnection, *args: Any) -> None:
        send(self, *args)
        if _acking:
            _acking.clear()
            os.kill(os.getpid(), signal.SIGQUIT)

    setattr(ServerConnection, name, watched_send)


Request.acknowledge = _watched_acknowledge
_watch("_send")
_watch("_send_unsent")
