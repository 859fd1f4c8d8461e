"""Threads and locks of the operating system, also where gevent or eventlet has patched Python's.

A patched thread is a greenlet: it stands still while another greenlet keeps the processor busy.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Any

try:
    from _queue import SimpleQueue  # `queue` may hold gevent's
except ImportError:  # PyPy
    from queue import SimpleQueue


def lock() -> Any:
    """A lock that the thread which holds it may take again, for a signal handler."""
    if gevent := _gevent():
        return gevent.get_original("_thread", "RLock")()
    return (_eventlet() or threading).RLock()


def start_thread(target: Callable[[], None], name: str) -> None:
    """Run a function in a thread that does not keep the process from ending."""
    if gevent := _gevent():
        gevent.get_original("_thread", "start_new_thread")(target, ())
        return
    (_eventlet() or threading).Thread(target=target, name=name, daemon=True).start()


class Bell:
    """Wakes one thread. Ringing never blocks, whoever does it."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """End the wait, or the next one."""
        self._rings.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until somebody rings, for so long at the most."""
        with suppress(Empty):
            self._rings.get(timeout=seconds)
            while True:
                self._rings.get_nowait()


def _gevent() -> Any:
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey if monkey is not None and monkey.is_module_patched("threading") else None


def _eventlet() -> Any:
    """Python's module `threading` as it was before eventlet patched it."""
    patcher: Any = sys.modules.get("eventlet.patcher")
    if patcher is None or not patcher.is_monkey_patched("thread"):
        return None
    return patcher.original("threading")
