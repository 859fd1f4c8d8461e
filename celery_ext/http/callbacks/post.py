"""Posts to a URL: no redirects, bounded in time and size, to the address that was checked."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from .ssrf_guard import Target

SUCCESS, TOO_MANY = 100, 101

#: With Retry-After, these statuses ask to be called later.
BUSY = (429, 503)


class CallbackFailed(Exception):
    """No answer, or not the one that means success."""


@dataclass(frozen=True)
class Answer:
    """What a receiver has said. `retry_after` is in seconds, None where it named none."""

    code: int
    retry_after: float | None = None


class _Connection(http.client.HTTPConnection):
    """To one of the addresses that were checked, whatever DNS says by now."""

    def __init__(self, target: Target, addresses: Iterable[Any], until: float) -> None:
        super().__init__(target.host, target.port)
        self._target, self._addresses, self._until = target, list(addresses), until
        self._is_cut = False
        self.default_port = 443 if target.scheme == "https" else 80

    def connect(self) -> None:
        error: OSError = OSError(f"{self.host} has no address")
        for number, (family, address) in enumerate(self._addresses):
            try:
                self._connect(family, address, len(self._addresses) - number)
                return
            except OSError as reason:
                if self.sock is not None:
                    self.sock.close()
                    self.sock = None
                error = reason
        raise error

    def _connect(self, family: Any, address: Any, addresses: int) -> None:
        """An address that does not answer leaves the next ones their share of the time."""
        sock = self._use(socket.socket(family, socket.SOCK_STREAM))
        sock.settimeout(max((self._until - time.monotonic()) / addresses, 0.001))
        sock.connect(address)
        sock.settimeout(max(self._until - time.monotonic(), 0.001))
        if self._target.scheme == "https":
            name = self._target.host.rstrip(".")
            secure = _tls().wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
            self._use(secure)
            secure.do_handshake()

    def _use(self, sock: socket.socket) -> socket.socket:
        self.sock = sock
        if self._is_cut:
            raise TimeoutError("its time was over before it was connected")
        return sock

    def cut(self) -> None:
        """End whatever it waits for or begins, from another thread."""
        self._is_cut = True
        if self.sock is not None:
            with suppress(OSError):
                # A TLS socket's own method would let what is being sent go out in the clear.
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates takes longer than most callbacks."""
    return ssl.create_default_context()


def post(
    target: Target,
    addresses: Iterable[Any],
    body: bytes,
    headers: dict[str, str],
    *,
    method: str = "POST",
    seconds: float,
    limit_bytes: int,
    by_status: bool = False,
) -> Answer:
    """Send a body, if there is one, and read the answer. Raises CallbackFailed.

    `by_status`: any status 2xx means success, and the body of the answer nothing.
    """
    until = time.monotonic() + seconds
    connection = _Connection(target, addresses, until)
    # A time-out of a socket begins anew with each byte.
    timer = threading.Timer(seconds, connection.cut)
    timer.daemon = True
    timer.start()
    try:
        connection.request(method, target.path, body or None, {**headers, "Connection": "close"})
        response = connection.getresponse()
        raw = b"" if by_status else response.read(limit_bytes + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        late = time.monotonic() >= until
        reason = f"no answer within {seconds:g} s" if late else f"{type(error).__name__}: {error}"
        raise CallbackFailed(reason[:200]) from None
    finally:
        timer.cancel()
        connection.close()
    if time.monotonic() >= until:  # what was cut off looks like an end
        raise CallbackFailed(f"no answer within {seconds:g} s")
    wait = _seconds(response.getheader("Retry-After"))
    if by_status and response.status in BUSY and wait is not None:
        return Answer(TOO_MANY, wait)
    if not 200 <= response.status < 300:
        raise CallbackFailed(f"status {response.status}")
    if by_status:
        return Answer(SUCCESS)
    if len(raw) > limit_bytes:
        raise CallbackFailed(f"its answer is longer than {limit_bytes} bytes")
    return Answer(_code(raw), wait)


def _code(raw: bytes) -> int:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise CallbackFailed("its answer is not JSON") from None
    code = found.get("code") if isinstance(found, dict) else None
    if type(code) is not int:
        raise CallbackFailed('its answer has no "code"')
    if code not in (SUCCESS, TOO_MANY):
        raise CallbackFailed(f"code {code}")
    return code


def _seconds(text: str | None) -> float | None:
    """Seconds, or a date; None for what is neither."""
    from email.utils import parsedate_to_datetime

    try:
        return max(float(int(text or "")), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(text or "").timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None
