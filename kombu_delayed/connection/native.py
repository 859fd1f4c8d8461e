"""Threads and locks of the operating system, even if gevent or eventlet has patched Python's.

A patched thread is a greenlet: it stands still while another greenlet keeps the processor busy.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from queue import Empty
from typing import TYPE_CHECKING, Any

from kombu.log import get_logger as _get_logger

try:
    from _queue import SimpleQueue  # `queue` may hold gevent's
except ImportError:  # PyPy
    from queue import SimpleQueue


if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # it takes no parameter in Python 3.10
    _Adapter = logging.LoggerAdapter


def lock() -> Any:
    """Return a reentrant lock, which a signal handler may take while its thread holds it."""
    if gevent := _gevent():
        return gevent.get_original("_thread", "RLock")()
    return (_eventlet() or threading).RLock()


def start_thread(target: Callable[[], None], name: str) -> None:
    """Run a function in a thread that does not keep the process from ending."""
    if gevent := _gevent():
        # Two threads that import the modules of the hub may deadlock.
        hub = _program_hub() or sys.modules["gevent"].get_hub()
        _watch_end(gevent.get_original("time", "sleep"))
        run = gevent.get_original("_thread", "start_new_thread")
        run(_run_beside_gevent, (target, hub))
    elif eventlet := _eventlet():
        _start_beside_eventlet(eventlet, target, name)
    else:
        threading.Thread(target=target, name=name, daemon=True).start()


#: The threads beside gevent that are closing their hubs, and whether the program is ending.
_closing: set[int] = set()
_is_ending = False

#: How long the end of the program waits for them: without an interpreter they abort the process.
CLOSING_SECONDS, LOOK_SECONDS = 2.0, 0.01


def _run_beside_gevent(target: Callable[[], None], hub: Any) -> None:
    number = _ident()
    _hubs[number] = hub
    try:
        target()
    finally:  # sockets have given the thread a hub, whose descriptors nothing else would close
        _closing.add(number)
        del _hubs[number]
        if not _is_ending:
            sys.modules["gevent"].get_hub().destroy(destroy_loop=True)
        _closing.discard(number)


@cache
def _watch_end(sleep: Callable[[float], None]) -> None:
    atexit.register(_end_beside_gevent, sleep)


def _end_beside_gevent(sleep: Callable[[float], None]) -> None:
    global _is_ending
    _is_ending = True
    for _ in range(int(CLOSING_SECONDS / LOOK_SECONDS)):
        if not _closing:
            break
        sleep(LOOK_SECONDS)


def _start_beside_eventlet(eventlet: Any, target: Callable[[], None], name: str) -> None:
    hubs: Any = sys.modules["eventlet.hubs"]
    hub = _program_hub() or hubs.get_hub()

    def run() -> None:
        _hubs[_ident()] = hub
        try:
            target()
        finally:
            del _hubs[_ident()]
            _close_hub(hubs.get_hub())

    eventlet.Thread(target=run, name=name, daemon=True).start()


def _close_hub(hub: Any) -> None:
    hub.abort(wait=True)
    if (poll := getattr(hub, "poll", None)) is not None and hasattr(poll, "close"):
        poll.close()


def has_eventlet() -> bool:
    """Return whether sockets are eventlet's."""
    return _eventlet() is not None


#: Thread beside greenlets -> the hub of gevent or eventlet in the program's thread.
_hubs: dict[int, Any] = {}


def is_beside_greenlets() -> bool:
    """Return whether this thread runs beside greenlets, where gevent can start no process."""
    return _program_hub() is not None


def hand_over(function: Callable[..., object], *args: Any, **options: Any) -> bool:
    """Call a function soon, in a greenlet of the program's thread, if this thread is beside it.

    Returns whether it is such a thread. Code that takes a patched lock, such as logging, must be
    handed over: eventlet's locks work in one thread only, and a greenlet that waits for one of
    gevent's while another thread has it may wait forever.
    """
    hub = _program_hub()
    if hub is None:
        return False
    call = partial(function, *args, **options)
    # The hub itself must not wait, so it starts a greenlet that may.
    if _eventlet():
        hub.schedule_call_global(0, sys.modules["eventlet.greenthread"].spawn_n, call)
    elif loop := hub.loop:  # none if the thread of the hub has ended
        loop.run_callback_threadsafe(sys.modules["gevent"].spawn, call)
    return True


class Logger(_Adapter):
    """Logs the records of a thread beside greenlets in the program's thread."""

    def log(self, level: int, msg: Any, *args: Any, **options: Any) -> None:
        """Like `log` of any logger."""
        if not hand_over(self.logger.log, level, msg, *args, **options):
            super().log(level, msg, *args, **options)


def get_logger(name: str) -> Logger:
    """Return a logger for a module whose code runs in such a thread."""
    return Logger(_get_logger(name), {})


class Bell:
    """Wakes one thread. Ringing never blocks, from any thread."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """End the wait, or the next one."""
        self._rings.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until the bell rings, at most for these seconds."""
        with suppress(Empty):
            self._rings.get(timeout=seconds)
            while True:
                self._rings.get_nowait()


def _program_hub() -> Any:
    """The hub of the program's thread if this thread is beside greenlets; None otherwise."""
    return _hubs.get(_ident()) if _hubs else None


def _ident() -> int:
    """Return the number of the native thread; greenlets have numbers of their own."""
    if gevent := _gevent():
        return int(gevent.get_original("_thread", "get_ident")())
    return (_eventlet() or threading).get_ident()


def _gevent() -> Any:
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey if monkey is not None and monkey.is_module_patched("threading") else None


def _eventlet() -> Any:
    """Python's module `threading` as it was before eventlet patched it."""
    patcher: Any = sys.modules.get("eventlet.patcher")
    if patcher is None or not patcher.is_monkey_patched("thread"):
        return None
    return patcher.original("threading")
