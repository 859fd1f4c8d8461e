"""A lock that a thread holds while its process forks is free in the child."""

from __future__ import annotations

import os
import sys
import threading
from functools import cached_property

import pytest
from kombu.transport import redis

from kombu_delayed.connection import forks
from kombu_delayed.transport.channel.channel import Channel


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cached properties have no lock")
@pytest.mark.parametrize(("owner", "name"), [(redis.Channel, "client"), (Channel, "store")])
def test_a_child_need_not_wait_for_a_thread_that_is_not_there(owner: type, name: str) -> None:
    forks.watch()
    found = next(vars(each)[name] for each in owner.__mro__ if name in vars(each))
    assert isinstance(found, cached_property)
    lock = found.lock  # type: ignore[attr-defined]
    locked, done = threading.Event(), threading.Event()

    def evaluate() -> None:
        with lock:
            locked.set()
            done.wait(60)

    thread = threading.Thread(target=evaluate)
    thread.start()
    locked.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(not found.lock.acquire(timeout=1))  # type: ignore[attr-defined]
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join(60)
    assert os.waitstatus_to_exitcode(status) == 0
