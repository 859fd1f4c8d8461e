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

from . import forks

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
    """Run a function in a thread that does not keep the process from ending.

    Beside greenlets the function is ended by SystemExit when the program ends.
    """
    if gevent := _gevent():
        # Two threads that import the modules of the hub may deadlock.
        hub = _program_hub() or sys.modules["gevent"].get_hub()
        _watch_end(gevent.get_original("time", "sleep"))
        run = gevent.get_original("_thread", "start_new_thread")
        run(_run_beside_gevent, (target, hub))
    elif eventlet := _eventlet():
        hub = _program_hub() or sys.modules["eventlet.hubs"].get_hub()
        _watch_end(sys.modules["eventlet.patcher"].original("time").sleep)
        run = partial(_run_beside_eventlet, target, hub)
        eventlet.Thread(target=run, name=name, daemon=True).start()
    else:
        threading.Thread(target=target, name=name, daemon=True).start()


#: Thread beside greenlets -> the hub of gevent or eventlet in the program's thread.
_hubs: dict[int, Any] = {}
#: Thread beside greenlets -> what ends its wait in its own hub; eventlet's look themselves.
_wakes: dict[int, Callable[[], object]] = {}
#: The threads that wait for a bell.
_waiting: set[int] = set()

#: A thread that returns from a hub while the interpreter ends may crash the process: Python exits
#: it, and destructors of its greenlets run without the interpreter's lock. So these threads are
#: ended before the interpreter, which waits for them at most for END_SECONDS.
_is_ending = False
END_SECONDS, LOOK_SECONDS, EVENTLET_LOOK_SECONDS = 2.0, 0.01, 0.25


def _run_beside_gevent(target: Callable[[], None], program_hub: Any) -> None:
    hub = sys.modules["gevent"].get_hub()
    main = sys.modules["gevent"].getcurrent()
    wake = partial(hub.loop.run_callback_threadsafe, main.throw, SystemExit)
    _run_beside(target, program_hub, wake, partial(hub.destroy, destroy_loop=True))


def _run_beside_eventlet(target: Callable[[], None], program_hub: Any) -> None:
    hub = sys.modules["eventlet.hubs"].get_hub()
    main = sys.modules["eventlet"].getcurrent()

    def look() -> None:  # because no other thread can end a wait in this hub
        if _is_ending:
            main.throw(SystemExit)
        hub.schedule_call_global(EVENTLET_LOOK_SECONDS, look)

    look()
    _run_beside(target, program_hub, lambda: None, partial(_close_hub, hub))


def _run_beside(
    target: Callable[[], None],
    program_hub: Any,
    wake: Callable[[], object],
    close: Callable[[], object],
) -> None:
    number = _ident()
    _hubs[number], _wakes[number] = program_hub, wake
    try:
        with suppress(SystemExit):
            if not _is_ending:
                target()
    finally:
        del _wakes[number]
        if not _is_ending:  # nothing else would close the descriptors of its hub
            close()
        del _hubs[number]


def _close_hub(hub: Any) -> None:
    if hub.running:
        hub.abort(wait=True)
    if (poll := getattr(hub, "poll", None)) is not None and hasattr(poll, "close"):
        poll.close()


@cache
def _watch_end(sleep: Callable[[float], None]) -> None:
    atexit.register(_end, sleep)
    forks.in_children(_forget_threads)


def _end(sleep: Callable[[float], None]) -> None:
    global _is_ending
    _is_ending = True
    for wake in tuple(_wakes.values()):
        with suppress(ValueError):  # the thread has just closed its hub
            wake()
    for _ in range(int(END_SECONDS / LOOK_SECONDS)):
        if _waiting.issuperset(_hubs):
            break
        sleep(LOOK_SECONDS)


def _forget_threads() -> None:
    for each in (_hubs, _wakes, _waiting):
        each.clear()


def has_eventlet() -> bool:
    """Return whether sockets are eventlet's."""
    return _eventlet() is not None


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
        number = _ident()
        _waiting.add(number)
        try:
            with suppress(Empty):
                self._rings.get(timeout=seconds)
                while True:
                    self._rings.get_nowait()
        finally:
            _waiting.discard(number)
        if _is_ending and number in _hubs:
            raise SystemExit


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
