"""Posts to a URL at the address that was checked, without redirects, in bounded time and size."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timezone
from typing import Any

from celery_ext.tasks.short_repr import printable

from .connections import Connection, idle
from .ssrf_guard import Target

SUCCESS, TOO_MANY = 100, 101

#: Statuses that, with Retry-After, ask for a call later.
BUSY = (429, 503)


#: The errors of a connection that its receiver closed while it was idle.
CLOSED = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)

#: The most that is left of an answer, and the longest it may take, for it to be read to its end in
#: order to keep the connection.
LITTLE_BYTES, LITTLE_SECONDS = 65_536, 0.25


class CallbackFailed(Exception):
    """There is no answer, or it does not mean success."""


@dataclass(frozen=True)
class Answer:
    """The answer of a receiver. `retry_after` is in seconds; None: it gave none."""

    code: int
    retry_after: float | None = None


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

    `by_status`: any status 2xx means success, and the body of the answer is ignored.
    """
    until = time.monotonic() + seconds
    addresses = [*addresses]
    kept = idle.take(target, addresses)
    connection = kept or Connection(target)
    connection.begin(addresses, until)
    # The timeout of a socket begins again with each byte.
    timer = threading.Timer(seconds, connection.cut)
    timer.daemon = True
    timer.start()
    try:
        response = _answered(connection, (method, target.path, body or None, headers), kept)
        raw = b"" if by_status else response.read(limit_bytes + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        connection.close()
        late = time.monotonic() >= until
        reason = f"no answer within {seconds:g} s" if late else f"{type(error).__name__}: {error}"
        raise CallbackFailed(printable(reason[:200])) from None
    else:
        is_late = time.monotonic() >= until  # an answer that was cut off looks complete
        _keep(connection, response)
    finally:
        timer.cancel()
    if is_late:
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


def _answered(
    connection: Connection, request: tuple[Any, ...], kept: Connection | None
) -> http.client.HTTPResponse:
    """Send a request, over a new connection if the kept one ends without an answer."""
    try:
        connection.request(*request)
        return connection.getresponse()
    except CLOSED:
        if kept is None:
            raise
        connection.close()
    connection.request(*request)
    return connection.getresponse()


def _keep(connection: Connection, response: http.client.HTTPResponse) -> None:
    """Keep a connection for the next callback if little or nothing of its answer is unread."""
    with suppress(OSError, http.client.HTTPException, ValueError):
        left = response.length
        if left is not None and left <= LITTLE_BYTES and connection.sock is not None:
            _read_little(connection.sock, response)
    is_final = response.status >= 200  # after a 101 another protocol begins
    if is_final and response.isclosed() and not response.will_close:
        idle.give(connection)
    else:
        response.close()
        connection.close()


def _read_little(sock: socket.socket, response: http.client.HTTPResponse) -> None:
    until = time.monotonic() + LITTLE_SECONDS
    while response.length and (seconds := until - time.monotonic()) > 0:
        sock.settimeout(seconds)  # it begins again with each byte
        if not response.read1():
            return
    if not response.length:
        response.read()  # it notes that this was the end


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
    """Read seconds, or a date, as seconds from now; None if it is neither."""
    from email.utils import parsedate_to_datetime

    with suppress(ValueError, OverflowError):
        return max(float(int(text or "")), 0.0)
    try:
        at = parsedate_to_datetime(text or "")
        at = at if at.tzinfo else at.replace(tzinfo=timezone.utc)
        return max(at.timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None
