"""Connections with a timeout for the head of a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

#: The most bytes of a head. No client of this API sends more.
HEAD_BYTES = 65_536


def header_timeout(seconds: float) -> type[asyncio.Protocol]:
    """Uvicorn's protocol, with a timeout for the head of each request."""
    return type("Timed", (_HeaderTimeout,), {"_header_seconds": seconds})


class _HeaderTimeout(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    _header_seconds: float
    _head_timer: Any = None
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        was_waiting = self._awaits_head()
        if was_waiting:
            self._head_bytes += len(data)
            self._await_head()
        super().data_received(data)
        if not self._awaits_head():
            self._has_head()
        elif was_waiting and self._head_bytes > HEAD_BYTES:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._has_head()
        super().connection_lost(error)

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._header_seconds, self._too_late)

    def _has_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer, self._head_bytes = None, 0

    def _too_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()
