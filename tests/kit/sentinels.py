"""A master, its replicas and the Sentinels that watch them, each a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from tests.kit.servers import STOP_SECONDS, Server, free_port, start_server
from tests.kit.wait import wait_until

MASTER = "mymaster"
PASSWORD, SENTINEL_PASSWORD = "pw", "sentinels-own"
DOWN_AFTER_MS = 1_000
HEAL_SECONDS = 30

#: Sentinel's own intervals, which fit a network: shorter here, where the server can.
HURRY = ("info-period", "500", "publish-period", "300", "ping-period", "500", "ask-period", "200")


@dataclass
class SentinelProcess:
    """One Sentinel; started again it goes on from the configuration that it has written."""

    binary: Path
    directory: Path
    port: int
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def configure(self, lines: dict[str, str]) -> None:
        self.directory.mkdir(parents=True)
        text = "".join(f"{name} {value}\n" for name, value in lines.items())
        (self.directory / "sentinel.conf").write_text(text)

    def start(self) -> None:
        with open(self.directory / "sentinel.log", "ab") as log:
            self._process = subprocess.Popen(
                [self.binary, self.directory / "sentinel.conf", "--sentinel"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(self._answers, f"the Sentinel of port {self.port} answers")
        with self.client() as client, contextlib.suppress(RedisError):
            client.execute_command("SENTINEL", "DEBUG", *HURRY)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except RedisError:
            return False

    @property
    def running(self) -> bool:
        return self._process is not None

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def client(self) -> redis.Redis:
        return redis.Redis(
            port=self.port,
            password=SENTINEL_PASSWORD,
            socket_timeout=1,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
        )

    def master(self) -> dict[str, Any]:
        """What it knows of the master."""
        with self.client() as client:
            # redis-py 6 cannot read the answer to `sentinel_master`.
            return client.sentinel_masters()[MASTER]  # type: ignore[no-any-return]


@dataclass
class Group:
    """Three servers, of which one is the master, and three Sentinels."""

    servers: list[Server]
    sentinels: list[SentinelProcess]

    @property
    def url(self) -> str:
        """Behind `delayed+`, with the master's password in the first one."""
        first, *others = (f"127.0.0.1:{each.port}" for each in self.sentinels)
        rest = "".join(f";delayed+sentinel://{each}" for each in others)
        return f"sentinel://:{PASSWORD}@{first}/0{rest}"

    @property
    def options(self) -> dict[str, Any]:
        """The transport options that belong to the URL."""
        return {"master_name": MASTER, "sentinel_kwargs": {"password": SENTINEL_PASSWORD}}

    @property
    def master(self) -> Server:
        """Where most Sentinels see it."""
        ports = [each.master()["port"] for each in self.sentinels if each.running]
        port = max(ports, key=ports.count)
        return next(server for server in self.servers if server.port == port)

    @property
    def replicas(self) -> list[Server]:
        master = self.master
        return [server for server in self.servers if server is not master]

    def client(self, server: Server | None = None) -> redis.Redis:
        return (server or self.master).client(password=PASSWORD, socket_timeout=5)

    def kill_master(self) -> Server:
        """Returns it; it stays down until `heal`."""
        master = self.master
        master.kill()
        return master

    def wait_for_failover(self, old: Server, timeout_seconds: float = 20) -> Server:
        wait_until(lambda: self.master is not old, "another master is named", timeout_seconds)
        return self.master

    def fail_over(self) -> Server:
        """Have a replica take over while the master is well; returns the old one, a replica."""
        old = self.master
        wait_until(lambda: self._has_moved_from(old), "another master is named", 40, 2)
        wait_until(lambda: _role(self.client(old)) == "slave", "the old master is a replica", 20)
        return old

    def _has_moved_from(self, old: Server) -> bool:
        if self.master is not old:
            return True
        with self.sentinels[0].client() as client, contextlib.suppress(RedisError):
            client.execute_command("SENTINEL", "FAILOVER", MASTER)
        return False

    def heal(self) -> None:
        """Start what is down, and wait until all know one another and no replica lags."""
        for each in (*self.servers, *self.sentinels):
            if each._process is None:
                each.start()
        wait_until(self.is_whole, "all servers and Sentinels are in touch", HEAL_SECONDS, 0.05)

    def is_whole(self) -> bool:
        """Whether all are in touch and no replica lags."""
        try:
            views = [each.master() for each in self.sentinels]
            if len({view["port"] for view in views}) > 1 or not all(map(_is_complete, views)):
                return False
            with self.client() as client:
                return client.wait(2, 100) == 2
        except RedisError:
            return False

    def stop(self) -> None:
        for each in (*self.sentinels, *self.servers):
            each.stop()


def _role(client: redis.Redis) -> str:
    try:
        with client:
            return str(client.info("replication")["role"])  # type: ignore[index]
    except RedisError:  # whoever becomes a replica closes its connections
        return ""


def _is_complete(view: dict[str, Any]) -> bool:
    known = view["num-slaves"], view["num-other-sentinels"]
    return known == (2, 2) and view["is_master"] and not view["is_sdown"]


@contextlib.contextmanager
def start_group(
    kind: str,
    directory: Path,
    down_after_ms: int = DOWN_AFTER_MS,
    environment: dict[str, str] | None = None,
) -> Iterator[Group]:
    """Start it all, every server with a password and every Sentinel with another one."""
    with contextlib.ExitStack() as stack:
        servers: list[Server] = []
        for n in range(3):
            replicates = {"replicaof": f"127.0.0.1 {servers[0].port}"} if servers else {}
            config = {
                "requirepass": PASSWORD,
                "masterauth": PASSWORD,
                "repl-diskless-sync": "yes",
                "repl-diskless-sync-delay": "0",
                **replicates,
            }
            options: Any = {"append_only": True, "config": config, "environment": environment}
            server = start_server(kind, directory / f"server{n}", port=0, **options)
            servers.append(stack.enter_context(server))
        group = Group(servers, [])
        stack.callback(group.stop)
        for n in range(3):
            port = free_port()
            sentinel = SentinelProcess(servers[0].binary, directory / f"sentinel{n}", port)
            sentinel.configure(_lines(sentinel, servers[0].port or 0, down_after_ms))
            group.sentinels.append(sentinel)
        group.heal()
        yield group


def _lines(sentinel: SentinelProcess, master_port: int, down_after_ms: int) -> dict[str, str]:
    return {
        "port": str(sentinel.port),
        "bind": "127.0.0.1",
        "dir": f'"{sentinel.directory}"',
        "requirepass": f'"{SENTINEL_PASSWORD}"',
        "sentinel sentinel-pass": f'"{SENTINEL_PASSWORD}"',
        f"sentinel monitor {MASTER}": f"127.0.0.1 {master_port} 2",
        f"sentinel auth-pass {MASTER}": PASSWORD,
        f"sentinel down-after-milliseconds {MASTER}": str(down_after_ms),
        f"sentinel failover-timeout {MASTER}": "1500",
        f"sentinel parallel-syncs {MASTER}": "2",
    }
