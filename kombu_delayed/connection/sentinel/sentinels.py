"""Asks the Sentinels which server is the master."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from redis import sentinel
from redis.exceptions import ResponseError

from kombu_delayed.errors import UNREACHABLE, OptionError

from .watch import MasterWatch, present

_NO_ANSWER: tuple[type[BaseException], ...] = (*UNREACHABLE, ResponseError)


class Sentinels(sentinel.Sentinel):
    """Asks one Sentinel after the other for the master, first the one that knew it last."""

    has_found = False
    watch: MasterWatch

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return the master's host and port.

        Raises MasterNotFoundError, a connection error, while there is none, and OptionError if
        there never was one of this name.
        """
        silent: list[str] = []
        behind: list[tuple[int, tuple[str, int]]] = []
        known: set[str] = set()
        for node in sorted(self.sentinels, key=lambda each: _where(each) != self.watch.named_by):
            try:
                masters: Any = _asked(node, node.sentinel_masters)
                known.update(masters)
                state = masters.get(service_name)
                if not state or not self.check_master_state(state, service_name):
                    continue
                address = _asked(node, partial(present, node, service_name, state))
            except _NO_ANSWER as error:
                silent.append("{}:{}: {}".format(*_where(node), error))
                continue
            self.has_found = True
            if not self.watch.found(address, epoch := int(state.get("config-epoch", 0))):
                behind.append((epoch, address))
                continue
            self.sentinels = [node, *(other for other in self.sentinels if other is not node)]
            return address
        if behind:
            epoch, address = max(behind)
            self.watch.found_no_newer(address, epoch)
            return address
        is_unknown = service_name not in known and 2 * len(silent) < len(self.sentinels)
        if is_unknown and not self.has_found:
            raise OptionError(_unknown(service_name, known))
        raise sentinel.MasterNotFoundError(
            "; ".join([f"no Sentinel reports a running master {service_name!r}", *silent])
        )

    def hang_up(self) -> None:
        """Close the connections to the Sentinels."""
        for node in self.sentinels:
            node.connection_pool.disconnect()


def _unknown(service_name: str, known: Iterable[str]) -> str:
    names = ", ".join(repr(name) for name in sorted(known)) or "none"
    if not service_name:
        return f"delayed+sentinel:// needs the transport option master_name; there is {names}"
    return (
        f"the Sentinels know no master {service_name!r}, the value of the transport option "
        f"master_name; they know {names}"
    )


def _asked(node: Any, ask: Callable[[], Any]) -> Any:
    """Ask and keep no connection: another thread may ask next, under gevent or eventlet."""
    try:
        return ask()
    finally:
        node.connection_pool.disconnect(inuse_connections=False)


def _where(node: Any) -> tuple[str, int]:
    parameters = node.connection_pool.connection_kwargs
    return parameters["host"], parameters["port"]
