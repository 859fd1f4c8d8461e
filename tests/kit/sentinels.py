"""A master, its replicas and the Sentinels that watch them, each a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import RedisError, ResponseError

from tests.kit.servers import Server, free_port, start_server
from tests.kit.wait import wait_until

MASTER = "mymaster"
PASSWORD, SENTINEL_PASSWORD = "pw", "sentinels-own"
DOWN_AFTER_MS = 1_000
HEAL_SECONDS = 30

#: Sentinel's own intervals fit a network; these are shorter, where the server allows it.
HURRY = ("info-period", "500", "publish-period", "300", "ping-period", "500", "ask-period", "200")
#: The default intervals: a replaced master learns about 10 s later that it is a replica.
UNHURRIED = ("info-period", "10000", "publish-period", "2000", "ping-period", "1000")
UNHURRIED += ("ask-period", "1000")


class SentinelProcess(Server):
    """One Sentinel; after a restart it continues from the configuration that it has written."""

    def __init__(self, binary: Path, directory: Path, port: int) -> None:
        super().__init__("sentinel", binary, directory, {}, port, None, None)

    def configure(self, lines: dict[str, str]) -> None:
        self.directory.mkdir(parents=True)
        self.options = lines
        self._config = self._write_options()

    def _command(self) -> list[Path | str]:
        return [self.binary, self._config, "--sentinel"]

    def start(self) -> None:
        super().start()
        with self.client() as client, contextlib.suppress(RedisError):
            client.execute_command("SENTINEL", "DEBUG", *HURRY)

    def client(self, **options: Any) -> redis.Redis:
        own = {"password": SENTINEL_PASSWORD, "socket_timeout": 1, "decode_responses": True}
        return super().client(**{**own, **options})

    def master(self) -> dict[str, Any]:
        """The Sentinel's view of the master."""
        with self.client() as client:
            # redis-py 6 cannot read the answer to `sentinel_master`.
            return client.sentinel_masters()[MASTER]  # type: ignore[no-any-return]


@dataclass
class Group:
    """Three servers, one of them the master, and three Sentinels."""

    servers: list[Server]
    sentinels: list[SentinelProcess]

    @property
    def url(self) -> str:
        """The URL without `delayed+`; its first part has the master's password."""
        first, *others = (f"127.0.0.1:{each.port}" for each in self.sentinels)
        rest = "".join(f";delayed+sentinel://{each}" for each in others)
        return f"sentinel://:{PASSWORD}@{first}/0{rest}"

    @property
    def options(self) -> dict[str, Any]:
        return {"master_name": MASTER, "sentinel_kwargs": {"password": SENTINEL_PASSWORD}}

    @property
    def master(self) -> Server:
        """The server that most Sentinels take for the master."""
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
        """Kills the master and returns it; it stays down until `heal`."""
        master = self.master
        master.kill()
        return master

    def wait_for_failover(self, old: Server, timeout_seconds: float = 60) -> Server:
        wait_until(lambda: self.master is not old, "another master is named", timeout_seconds)
        return self.master

    def fail_over(self) -> Server:
        """Have a replica take over while the master is well; returns the old one, a replica."""
        old = self.switch()
        wait_until(lambda: _role(self.client(old)) == "slave", "the old master is a replica", 20)
        return old

    def switch(self) -> Server:
        """Have a replica take over; returns the old master, whose role is not changed yet."""
        old = self.master
        wait_until(lambda: self._has_moved_from(old), "another master is named", 60, 0.05)
        return old

    def is_master(self, server: Server) -> bool:
        return _role(self.client(server)) == "master"

    def pace(self, intervals: tuple[str, ...]) -> None:
        """Set the intervals of running Sentinels; those of Redis 6.2 cannot be changed."""
        for sentinel in self.sentinels:
            if sentinel.running:
                with sentinel.client() as client, contextlib.suppress(ResponseError):
                    client.execute_command("SENTINEL", "DEBUG", *intervals)

    def _has_moved_from(self, old: Server) -> bool:
        """Whether another master is named; otherwise start a failover unless one is under way.

        On a busy machine a Sentinel gives up a failover that takes longer than `failover-timeout`.
        """
        if self.master is not old:
            return True
        first = self.sentinels[0]
        with first.client() as client, contextlib.suppress(RedisError):
            if first.master()["port"] == old.port:
                client.execute_command("SENTINEL", "FAILOVER", MASTER)
        return False

    def heal(self) -> None:
        """Start servers that are down; wait until all know one another and no replica lags."""
        for each in (*self.servers, *self.sentinels):
            if not each.running:
                each.start()
        wait_until(self.is_whole, "all servers and Sentinels are in touch", HEAL_SECONDS, 0.05)

    def is_whole(self) -> bool:
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
    except RedisError:  # a server that becomes a replica closes its connections
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
    """Start all of it; every server has a password, and every Sentinel another one."""
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
            sentinel.configure(
                {
                    "port": str(port),
                    "bind": "127.0.0.1",
                    "dir": f'"{sentinel.directory}"',
                    "requirepass": f'"{SENTINEL_PASSWORD}"',
                    "sentinel sentinel-pass": f'"{SENTINEL_PASSWORD}"',
                    f"sentinel monitor {MASTER}": f"127.0.0.1 {servers[0].port} 2",
                    f"sentinel auth-pass {MASTER}": PASSWORD,
                    f"sentinel down-after-milliseconds {MASTER}": str(down_after_ms),
                    f"sentinel failover-timeout {MASTER}": "1500",
                    f"sentinel parallel-syncs {MASTER}": "2",
                }
            )
            group.sentinels.append(sentinel)
        group.heal()
        yield group
