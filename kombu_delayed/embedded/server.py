"""A real server for one machine: started by the first process that needs it, shared by all."""

from __future__ import annotations

import contextlib
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import UnixDomainSocketConnection
from redis.exceptions import RedisError

from ..connection.native import get_logger, is_beside_greenlets
from ..errors import EmbeddedServerError
from . import files, posix, process
from .binary import find_server
from .process import State

#: How long a process waits before it restarts a server again that keeps ending.
REVIVAL_SECONDS = 5.0
LISTEN_SECONDS = 1.0

logger = get_logger(__name__)
_revived_at: dict[Path, float] = {}


@dataclass(frozen=True)
class Status:
    """The state of the server of a directory."""

    running: bool
    socket: Path
    pid: int | None = None
    server_name: str = ""
    server_version: str = ""
    keys: int = 0
    used_memory_bytes: int = 0
    uptime_seconds: int = 0
    #: It cannot write its data, as on a full disk, and refuses new messages.
    refuses_writes: bool = False


def ensure(directory: str | Path) -> Path:
    """Return the unix socket of the running server of `directory`, starting it if needed.

    Raises EmbeddedServerError when no server can be found, started or reached within 60 seconds.
    """
    with files.explained(directory) as path:
        files.make_private(path)
        socket = files.socket_path(path)
        state = process.state(path, socket)
        if state is not State.READY:
            state = _ensure_locked(path, socket)
    if state is not State.READY:
        raise EmbeddedServerError(f"The server of {path} {state.value}.{files.log_tail(path)}")
    return socket


def _ensure_locked(directory: Path, socket: Path) -> State:
    with files.locked(directory) as deadline:
        state = _settled(directory, socket, deadline)
        if state is State.ABSENT:
            process.launch(find_server(), directory, socket)
            state = _settled(directory, socket, deadline)
    return state


def _settled(directory: Path, socket: Path, deadline: float) -> State:
    def reason() -> str:
        return (
            f"the server of {directory} (pid {files.pid_text(directory)}) {State.BUSY.value} on "
            f"{socket}. If that socket was removed, or TMPDIR changed, end the process."
            f"{files.log_tail(directory)}"
        )

    while (state := process.state(directory, socket)) is State.BUSY:
        files.pause(deadline, reason)
    return state


def revive(directory: str | Path) -> None:
    """Restart the server of `directory`, unless it is alive or another process starts or stops it.

    Returns when it accepts commands, or after a second if it is still loading its data. Raises
    EmbeddedServerError if nothing listens by then. The server may still start.
    """
    with files.explained(directory) as path:
        socket = files.socket_path(path)
        if time.monotonic() >= _revived_at.get(path, -math.inf) + REVIVAL_SECONDS:
            _revive(path, socket)
        deadline = time.monotonic() + LISTEN_SECONDS
        while process.state(path, socket) in (State.ABSENT, State.BUSY):
            if time.monotonic() >= deadline:
                if process.listening(socket):
                    return
                raise EmbeddedServerError(f"Nothing listens on {socket}.{files.log_tail(path)}")
            time.sleep(files.POLL_SECONDS)


def _revive(directory: Path, socket: Path) -> None:
    with open(directory / "lock", "a") as lock:
        if not posix.try_lock(lock.fileno()):
            return
        try:
            if not (files.held(directory) or process.listening(socket)):
                _revived_at[directory] = time.monotonic()
                logger.warning("The server of %s is gone. Starting it again.", directory)
                process.launch(find_server(), directory, socket)
        finally:
            posix.unlock(lock.fileno())


def status(directory: str | Path) -> Status:
    """The state of the server of `directory`. Starts and changes nothing."""
    with files.explained(directory) as path:
        if not path.is_dir():
            return Status(running=False, socket=path / "broker.sock")
        return _status(path, files.socket_path(path))


def _status(directory: Path, socket: Path) -> Status:
    try:
        with contextlib.closing(process.new_client(socket)) as client:
            return _status_of(socket, client.info())
    except RedisError as error:
        if not files.held(directory):
            return Status(running=False, socket=socket)
        raise EmbeddedServerError(
            f"The server of {directory} (pid {files.pid_text(directory)}) is alive, but does not "
            f"answer on {socket}: {error}"
        ) from error


def _status_of(socket: Path, info: Any) -> Status:
    databases = [value for name, value in info.items() if re.fullmatch(r"db\d+", name)]
    return Status(
        running=True,
        socket=socket,
        pid=int(info["process_id"]),
        server_name=str(info.get("server_name", "redis")),
        server_version=str(info.get("valkey_version", info["redis_version"])),
        keys=sum(int(database["keys"]) for database in databases),
        used_memory_bytes=int(info["used_memory"]),
        uptime_seconds=int(info["uptime_in_seconds"]),
        refuses_writes=not process.can_write(info),
    )


def stop(directory: str | Path) -> bool:
    """Stop the server of `directory` and flush its data. False if none was running.

    If it cannot write its data, it keeps running, and EmbeddedServerError is raised.
    """
    with files.explained(directory) as path:
        return (path / "lock").exists() and _stop_locked(path)


def _stop_locked(directory: Path) -> bool:
    with files.locked(directory) as deadline:
        socket = files.socket_path(directory)
        if process.state(directory, socket) is State.ABSENT:
            return False
        process.shut_down(directory, socket)
        while process.state(directory, socket) is not State.ABSENT:
            files.pause(
                deadline,
                lambda: f"the server of {directory} does not end.{files.log_tail(directory)}",
            )
    return True


class EmbeddedConnection(UnixDomainSocketConnection):
    """A connection to the server of `directory`, which restarts it if it was killed.

    The socket is `path`.
    """

    def __init__(self, directory: str | Path, **options: Any) -> None:
        super().__init__(**options)
        self._directory = directory

    def _connect(self) -> Any:
        try:
            return super()._connect()
        except (FileNotFoundError, ConnectionRefusedError):  # nothing listens
            if is_beside_greenlets():  # the thread of the program starts it
                raise
            try:
                revive(self._directory)
            except EmbeddedServerError as error:
                raise ConnectionRefusedError(str(error)) from error
            return super()._connect()
