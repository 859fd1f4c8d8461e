"""Reads several keys of a queue at one instant."""

from __future__ import annotations

import time
from collections.abc import Sequence
from time import monotonic
from typing import Any

from redis.exceptions import AskError, MovedError, ResponseError, TryAgainError

from kombu_delayed.connection.cluster.connection import MOVING_SECONDS
from kombu_delayed.connection.commands import pack
from kombu_delayed.connection.connection import ServerConnection
from kombu_delayed.errors import ServerFull, translate
from kombu_delayed.store.calls.scripts import script
from kombu_delayed.store.store import Store

Command = tuple[Any, ...]

#: The interval between tries while a slot moves to another node.
RETRY_SECONDS = 0.05


class Transactions:
    """Sends transactions over its own connection; on a Cluster, to the node of the queue."""

    def __init__(self, store: Store) -> None:
        self._run: Any = store.run
        self._server: Any = None
        self._connection: Any = None

    def __call__(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands in one transaction and return their answers; their keys share a slot.

        Waits while the slot moves to another node. Raises redis-py's errors.
        """
        deadline = monotonic() + MOVING_SECONDS
        while True:
            answers = self._answers([("MULTI",), *commands, ("EXEC",)])
            errors = [each for each in answers if isinstance(each, ResponseError)]
            if not errors:
                break
            # And MovedError, which is an AskError.
            is_elsewhere = any(isinstance(each, (AskError, TryAgainError)) for each in errors)
            if any(isinstance(translate(each), ServerFull) for each in errors):
                return self._by_script(commands)
            if not is_elsewhere or monotonic() > deadline:
                raise errors[0]
            if isinstance(errors[0], MovedError):
                self._run.cluster.redirected(errors[0], self._server.node)
            time.sleep(RETRY_SECONDS)
        found: list[Any] = answers[-1]
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found

    def _by_script(self, commands: Sequence[Command]) -> list[Any]:
        keys = [*dict.fromkeys(key for _, key, *_ in commands)]
        parts: list[Any] = []
        for name, key, *rest in commands:
            parts += len(rest) + 2, name, keys.index(key) + 1, *rest
        found: list[Any] = script("together")(self._run, keys=keys, commands=parts)
        return found

    def _answers(self, commands: Sequence[Command]) -> list[Any]:
        connection = self._connected(self._run.to(commands[1]))
        try:
            connection.send_packed_command([b"".join(map(pack, commands))])
            return [_read(connection) for _ in commands]
        except BaseException:
            connection.disconnect()
            raise

    def _connected(self, server: ServerConnection) -> Any:
        if server is not self._server:
            self.close()
            self._server, self._connection = server, server.pool.get_connection()
        return self._connection

    def close(self) -> None:
        if self._server is not None:
            self._server.pool.release(self._connection)
            self._server = None


def _read(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error
