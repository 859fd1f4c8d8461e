"""Connections to the receivers of callbacks, kept open for the next jobs."""

from __future__ import annotations

import http.client
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from .ssrf_guard import Target

#: How many idle connections a process keeps, how many of them to one receiver, and how long.
MOST, OF_EACH, IDLE_SECONDS = 64, 8, 20.0


class _Response(http.client.HTTPResponse):
    """The final answer: interim ones before it, such as 103 Early Hints, are skipped."""

    def _read_status(self) -> tuple[str, int, str]:
        while True:
            found: tuple[str, int, str] = super()._read_status()  # type: ignore[misc]
            if not 101 < found[1] < 200:  # 100 is passed over by the library itself
                return found
            http.client.parse_headers(self.fp)

    def _read_next_chunk_size(self) -> int:
        size: int = super()._read_next_chunk_size()  # type: ignore[misc]
        if size < 0:  # the library would read without a limit
            raise http.client.HTTPException(f"a chunk of {size} bytes")
        return size


class Connection(http.client.HTTPConnection):
    """A connection to one of the addresses that were checked, even if DNS has changed since."""

    response_class = _Response

    def __init__(self, target: Target) -> None:
        super().__init__(target.host, target.port)
        self.target = target
        self.addresses: Sequence[Any] = ()
        #: The address that it is connected to, or None.
        self.address: Any = None
        self.idle_since = self._until = 0.0
        self._is_cut = False
        self.default_port = 443 if target.scheme == "https" else 80

    def begin(self, addresses: Sequence[Any], until: float) -> None:
        """Prepare for a request to one of some addresses, which must end by `until`."""
        self.addresses, self._until, self._is_cut = addresses, until, False
        if self.sock is not None:
            self.sock.settimeout(self._left)

    @property
    def _left(self) -> float:
        return max(self._until - time.monotonic(), 0.001)

    def connect(self) -> None:
        error: OSError = OSError(f"{self.host} has no address")
        for number, each in enumerate(self.addresses):
            try:
                self._connect(each, len(self.addresses) - number)
                self.address = each
                return
            except OSError as reason:
                if self.sock is not None:
                    self.sock.close()
                    self.sock = None
                error = reason
        raise error

    def _connect(self, to: tuple[Any, Any], addresses: int) -> None:
        """Connect to an address, in its share of the time: the next addresses need theirs."""
        family, address = to
        sock = self._use(socket.socket(family, socket.SOCK_STREAM))
        sock.settimeout(max(self._left / addresses, 0.001))
        sock.connect(address)
        sock.settimeout(self._left)
        if self.target.scheme == "https":
            name = self.target.host.rstrip(".")
            secure = _tls().wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
            self._use(secure)
            secure.do_handshake()

    def _use(self, sock: socket.socket) -> socket.socket:
        self.sock = sock
        if self._is_cut:
            raise TimeoutError("it timed out before it was connected")
        return sock

    def cut(self) -> None:
        """Abort what it waits for, or is about to begin, from another thread."""
        self._is_cut = True
        if self.sock is not None:
            with suppress(OSError):
                # The method of a TLS socket would let the rest of the request go out unencrypted.
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    @property
    def is_usable(self) -> bool:
        """Whether it is connected, not cut, and neither closed nor written to by the receiver."""
        if self.sock is None or self._is_cut:
            return False
        with suppress(OSError, ValueError):
            return not select.select([self.sock], [], [], 0)[0]
        return False


@cache
def _tls() -> ssl.SSLContext:
    """The TLS context, cached: reading the certificates takes longer than most callbacks."""
    return ssl.create_default_context()


class Idle:
    """The idle connections of a process. Threads and greenlets share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Connection] = []  # the one that has been idle longest first
        self._pid = os.getpid()

    def take(self, target: Target, addresses: Sequence[Any]) -> Connection | None:
        """Take an idle connection to one of a receiver's present addresses, if there is one."""
        with self._lock:
            self._drop_old()
            for each in reversed(self._idle):
                is_same = _receiver(each.target) == _receiver(target)
                if is_same and each.address in addresses:
                    self._idle.remove(each)
                    if each.is_usable:
                        each.target = target
                        return each
                    each.close()
        return None

    def give(self, connection: Connection) -> None:
        """Keep a connection whose last answer was read to its end; close it if it is not usable."""
        if not connection.is_usable:
            connection.close()
            return
        with self._lock:
            self._drop_old()
            receiver = _receiver(connection.target)
            own = [each for each in self._idle if _receiver(each.target) == receiver]
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
            crowded = own[:1] if len(own) >= OF_EACH else self._idle[: len(self._idle) - MOST]
            for each in crowded:
                self._idle.remove(each)
                each.close()

    def _drop_old(self) -> None:
        if self._pid != os.getpid():  # the parent uses its connections
            self._pid, self._idle = os.getpid(), []
        oldest = time.monotonic() - IDLE_SECONDS
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.pop(0).close()


def _receiver(target: Target) -> tuple[str, str, int]:
    return target.scheme, target.host, target.port


#: The idle connections of this process.
idle = Idle()
