"""The connections that leases hang on give up long before a lease has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection


@pytest.mark.parametrize("name", ["socket_timeout", "socket_connect_timeout"])
@pytest.mark.parametrize("given", [60, None, 0.1])
def test_a_long_limit_does_not_outlast_the_lease(
    connect: Callable[..., Connection], name: str, given: float | None
) -> None:
    options = {"delayed_lease_seconds": 4, name: given}
    channel: Any = connect(**options).channel()
    limit = channel._keepers_pool().connection_kwargs[name]
    assert limit == (0.1 if given == 0.1 else 1)


class Asked:
    """A lock that says when another thread wants it."""

    def __init__(self) -> None:
        self.by_another = threading.Event()
        self._own, self._lock = threading.get_ident(), threading.RLock()

    def __enter__(self) -> None:
        if threading.get_ident() != self._own:
            self.by_another.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_two_threads_ask_over_one_pool(
    connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel: Any = connect().channel()
    lock = channel.handed_out._lock = Asked()
    made: list[Any] = []
    stores: list[Any] = []
    other = threading.Thread(target=lambda: stores.append(channel.handed_out.store))
    make = channel._impatient_pool

    def make_while_another_asks() -> Any:
        made.append(make())
        if len(made) == 1:
            other.start()
            assert lock.by_another.wait(30)
        else:
            lock.by_another.set()
        return made[-1]

    monkeypatch.setattr(channel, "_impatient_pool", make_while_another_asks)
    stores.append(channel.handed_out.store)
    other.join(30)
    assert len(made) == 1
    assert stores[0] is stores[1]
