"""TLS connections that soon notice a server without TLS."""

from __future__ import annotations

from typing import Any

import redis

#: The limit for a handshake: a server without TLS silently waits for the end of a command.
HANDSHAKE_SECONDS = 3.0


class TlsConnection(redis.SSLConnection):
    """A TLS connection whose handshake has a time limit of its own."""

    def _wrap_socket_with_ssl(self, sock: Any) -> Any:
        sock.settimeout(min(self.socket_timeout or HANDSHAKE_SECONDS, HANDSHAKE_SECONDS))
        try:
            wrapped = super()._wrap_socket_with_ssl(sock)
        except TimeoutError:
            raise redis.TimeoutError(
                f"no answer to a TLS handshake from {self.host}:{self.port} within "
                f"{HANDSHAKE_SECONDS:g} s: does this port speak TLS, as the broker URL says?"
            ) from None
        wrapped.settimeout(self.socket_timeout)
        return wrapped
