"""The app for tests whose workers read nothing from their pool while a file exists.

KOMBU_DELAYED_TEST_DEAF names the file. A worker that is told to end reads again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery.concurrency.asynpool import ResultHandler

from tests.kit.tasks_app import app as app

VARIABLE = "KOMBU_DELAYED_TEST_DEAF"
_make = ResultHandler._make_process_result


def _make_deaf(self: Any, hub: Any) -> Callable[[int], None]:
    read = _make(self, hub)

    def read_unless_deaf(fd: int) -> None:
        if Path(os.environ[VARIABLE]).exists():
            time.sleep(0.01)  # the event loop would call this again at once
        else:
            read(fd)

    return read_unless_deaf


ResultHandler._make_process_result = _make_deaf
