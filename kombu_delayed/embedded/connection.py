"""Connections to an embedded server, which restart it if it was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redis import UnixDomainSocketConnection

from ..errors import EmbeddedServerError
from . import server as embedded


class EmbeddedConnection(UnixDomainSocketConnection):
    """A connection to the server of `directory`, on the socket `path`."""

    def __init__(self, directory: str | Path, **options: Any) -> None:
        super().__init__(**options)
        self._directory = directory

    def _connect(self) -> Any:
        try:
            return super()._connect()
        except (FileNotFoundError, ConnectionRefusedError):  # nothing listens
            try:
                embedded.revive(self._directory)
            except EmbeddedServerError as error:
                raise ConnectionRefusedError(str(error)) from error
            return super()._connect()
