"""A Cluster of masters with replicas; every server is a process of its own."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot
from redis.exceptions import RedisError, ResponseError

from tests.kit.servers import Server, start_server
from tests.kit.wait import wait_until

PASSWORD = "pw"
NODE_TIMEOUT_MS = 1_000
HEAL_SECONDS = 30
SLOTS = 16_384


@dataclass
class Cluster:
    """A Cluster's servers; failovers change which of them are masters."""

    kind: str
    directory: Path
    servers: list[Server]
    #: The number of replicas of each master: one or none.
    replicas: int = 1
    append_only: bool = True
    environment: dict[str, str] | None = None
    #: Why `finish_move` failed.
    unfinished = ""

    @property
    def url(self) -> str:
        """The URL without `delayed+`: two of the nodes, which know the others."""
        first, second = self.servers[0].port, self.servers[1].port
        return f"rediscluster://:{PASSWORD}@127.0.0.1:{first};127.0.0.1:{second}"

    def client(self, server: Server) -> redis.Redis:
        return server.client(password=PASSWORD, socket_timeout=5)

    def routed(self) -> redis.RedisCluster:
        node = next(server for server in self.servers if server.running)
        return redis.RedisCluster(
            host="127.0.0.1", port=node.port or 0, password=PASSWORD, require_full_coverage=False
        )

    def nodes(self, server: Server | None = None) -> list[list[str]]:
        """The lines of CLUSTER NODES, as seen by a server."""
        servers = [server] if server else [s for s in self.servers if s.running]
        with self.client(servers[0]) as client:
            text = _bytes(client, "CLUSTER", "NODES")
        return [line.split() for line in text.decode().splitlines()]

    def master_of(self, key: str) -> Server:
        slot = key_slot(key.encode())
        if not (owners := self._owners(slot)):
            raise AssertionError(f"nobody has slot {slot}")
        return owners[0]

    def _owners(self, slot: int, server: Server | None = None) -> list[Server]:
        """The owners of a slot, as seen by a server."""
        return [self._at(fields) for fields in self.nodes(server) if _has(fields, slot)]

    def _at(self, fields: list[str]) -> Server:
        port = int(fields[1].partition("@")[0].rpartition(":")[2])
        return next(server for server in self.servers if server.port == port)

    def slots_of(self, master: Server) -> list[int]:
        """The slots that a master has."""
        lines = self.nodes()
        fields = next(fields for fields in lines if self._at(fields) is master)
        return [slot for slot in range(SLOTS) if _has(fields, slot)]

    def masters(self) -> list[Server]:
        """The servers with slots. A replica may have the move that it was doing before."""
        return [self._at(fields) for fields in self.nodes() if _ranges(fields)]

    def replicas_of(self, master: Server) -> list[Server]:
        lines = self.nodes()
        id = next(fields[0] for fields in lines if self._at(fields) is master)
        return [self._at(fields) for fields in lines if fields[3] == id]

    def successor(self, server: Server) -> Server:
        """The server itself, or the one that has taken over from it."""
        by_id = {fields[0]: fields for fields in self.nodes()}
        master = next(fields[3] for fields in by_id.values() if self._at(fields) is server)
        return server if master == "-" else self._at(by_id[master])

    def id_of(self, server: Server) -> str:
        with self.client(server) as client:
            return _bytes(client, "CLUSTER", "MYID").decode()

    def queues_apart(self, count: int = 3) -> list[str]:
        names = (f"queue{n}" for n in range(1000))
        found: dict[int, str] = {}
        while len(found) < count:
            name = next(names)
            found.setdefault(self.master_of(name).pid, name)
        return [*found.values()]

    def wait_for_failover(self, key: str, old: Server, timeout_seconds: float = 20) -> Server:
        """Wait until another server has the slot of a key, and says so."""

        def has_moved() -> bool:
            with contextlib.suppress(RedisError):
                new = self.master_of(key)
                with self.client(new) as client:
                    return new is not old and _role(client) == "master"
            return False

        wait_until(has_moved, f"another node has {key!r}", timeout_seconds)
        return self.master_of(key)

    def move(
        self,
        key: str,
        target: Server,
        *,
        on_half: Callable[[], Any] | None = None,
    ) -> None:
        """Move a key's slot to another master, as `redis-cli --cluster reshard` does."""
        source, slot = self.master_of(key), key_slot(key.encode())
        target_id = self.id_of(target)
        with self.client(source) as old, self.client(target) as new:
            self.begin_move(key, target)
            self._move_keys(old, target, slot)
            if on_half:
                on_half()
                self._move_keys(old, target, slot)
            new.execute_command("CLUSTER SETSLOT", slot, "NODE", target_id)
            with contextlib.suppress(ResponseError):  # without a slot it may be a replica by now
                old.execute_command("CLUSTER SETSLOT", slot, "NODE", target_id)

    def begin_move(self, key: str, target: Server) -> None:
        """Start the move of a key's slot to another master; no key has moved yet."""
        source, slot = self.master_of(key), key_slot(key.encode())
        source_id, target_id = self.id_of(source), self.id_of(target)
        with self.client(source) as old, self.client(target) as new:
            wait_until(lambda: _imports(new, slot, source_id), f"{target.port} takes slot {slot}")
            old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target_id)

    def finish_move(self, key: str, target: Server) -> bool:
        """Bring a slot to a master after a move that broke off, as `redis-cli --cluster fix` does.

        Returns whether all agree that it is there. If servers are down or lag, it takes another
        call; `unfinished` says why. A replica of the target may have taken over from it.
        """
        try:
            target, slot = self.successor(target), key_slot(key.encode())
            if not self._all_follow():
                raise RedisError("a replica lags")
            if not self._all_say(slot, target):
                self._bring(slot, target)
            if not self._all_say(slot, target):
                raise RedisError("not all servers have heard of the move")
        except (RedisError, OSError, AssertionError, StopIteration, KeyError) as error:
            self.unfinished = f"{type(error).__name__}: {error}"
            return False
        return True

    def _bring(self, slot: int, target: Server) -> None:
        """Move a slot's keys to a master from all others, whichever server claims the slot."""
        target_id = self.id_of(target)
        others = [server for server in self.masters() if server is not target]
        with contextlib.ExitStack() as stack:
            new = stack.enter_context(self.client(target))
            clients = [stack.enter_context(self.client(server)) for server in others]
            for client in (new, *clients):
                client.execute_command("CLUSTER SETSLOT", slot, "STABLE")
            for server, client in zip(others, clients, strict=True):
                if not client.execute_command("CLUSTER COUNTKEYSINSLOT", slot):
                    continue
                if not self._says(target, slot, target):
                    new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", self.id_of(server))
                # Keys may be moved from a server only while the slot is on its way.
                way = "MIGRATING" if self._says(server, slot, server) else "IMPORTING"
                client.execute_command("CLUSTER SETSLOT", slot, way, target_id)
                self._move_keys(client, target, slot, True)
            new.execute_command("CLUSTER SETSLOT", slot, "NODE", target_id)
            new.execute_command("CLUSTER BUMPEPOCH")
            for client in clients:
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", target_id)

    def _all_say(self, slot: int, owner: Server) -> bool:
        return all(self._says(server, slot, owner) for server in self.servers if server.running)

    def _says(self, server: Server, slot: int, owner: Server) -> bool:
        """Whether a server takes another one, or itself, for the owner of a slot."""
        return self._owners(slot, server) == [owner]

    def _move_keys(
        self, old: redis.Redis, target: Server, slot: int, replace: bool = False
    ) -> None:
        where = "127.0.0.1", target.port, "", 0, 5000, *["REPLACE"] * replace
        while keys := old.execute_command("CLUSTER GETKEYSINSLOT", slot, 10):
            old.execute_command("MIGRATE", *where, "AUTH", PASSWORD, "KEYS", *keys)

    def start_node(self) -> Server:
        """A new server that knows no others."""
        self.directory.mkdir(exist_ok=True)
        # Never the directory of an earlier one: the new server would take itself for that one.
        directory = tempfile.mkdtemp(prefix="node", dir=self.directory)
        config = {
            "requirepass": PASSWORD,
            "masterauth": PASSWORD,
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(NODE_TIMEOUT_MS),
            "cluster-require-full-coverage": "no",
            "cluster-replica-validity-factor": "0",
            "repl-diskless-sync": "yes",
            "repl-diskless-sync-delay": "0",
        }
        server = start_server(
            self.kind,
            Path(directory),
            port=free_cluster_port(),
            append_only=self.append_only,
            config=config,
            environment=self.environment,
        )
        self.servers.append(server)
        return server

    def add_master(self) -> Server:
        """A new node without slots, known to all."""
        server = self.start_node()
        with self.client(self.servers[0]) as client:
            client.execute_command("CLUSTER MEET", "127.0.0.1", server.port)
        wait_until(lambda: self._all_know(len(self.servers)), "all know the new node", 20)
        wait_until(lambda: self._sees_all(server), "the new node knows all", 20)
        return server

    def remove(self, server: Server, *, stop: bool = True) -> None:
        """Forget a node that has no slots any more; stop it, or leave it running."""
        id = self.id_of(server)
        self.servers.remove(server)
        if stop:
            server.stop()
        else:
            with self.client(server) as client:
                client.execute_command("CLUSTER RESET")
        for each in self.servers:
            with self.client(each) as client:
                client.execute_command("CLUSTER FORGET", id)

    def _all_know(self, count: int) -> bool:
        return all(len(self.nodes(server)) == count for server in self.servers)

    def heal(self) -> None:
        """Start servers that are down; wait until all masters have replicas and all is covered."""
        for server in self.servers:
            if not server.running:
                server.start()
        wait_until(self.is_whole, "the Cluster is whole", HEAL_SECONDS, 0.05)

    def is_whole(self) -> bool:
        """Whether all agree, nothing fails and no replica lags."""
        try:
            seen = all(map(self._sees_all, self.servers))
            return seen and self._all_follow()
        except (RedisError, StopIteration):
            return False

    def is_covered(self) -> bool:
        """Whether all know the owner of each slot."""
        return all(self._knows_slots(server) for server in self.servers)

    def _knows_slots(self, server: Server) -> bool:
        with self.client(server) as client:
            return f"cluster_slots_assigned:{SLOTS}".encode() in _bytes(client, "CLUSTER", "INFO")

    def _sees_all(self, server: Server) -> bool:
        lines = self.nodes(server)
        if any("fail" in fields[2] or fields[7] != "connected" for fields in lines):
            return False
        with self.client(server) as client:
            return b"cluster_state:ok" in _bytes(client, "CLUSTER", "INFO")

    def _all_follow(self) -> bool:
        """Whether no replica lags."""
        return all(map(self._follows, self.masters()))

    def _follows(self, master: Server) -> bool:
        with self.client(master) as client:
            return int(client.execute_command("WAIT", self.replicas, 100)) >= self.replicas

    def flush(self) -> None:
        for master in self.masters():
            with self.client(master) as client:
                client.flushall()

    def close(self) -> None:
        for server in self.servers:
            server.stop()


def _has(fields: list[str], slot: int) -> bool:
    """Whether a line of CLUSTER NODES belongs to the owner of a slot."""
    ranges = (part.partition("-") for part in _ranges(fields))
    return any(int(low) <= slot <= int(high or low) for low, _, high in ranges)


def _ranges(fields: list[str]) -> list[str]:
    """The slots of a line of CLUSTER NODES, without those that are being moved."""
    return [part for part in fields[8:] if not part.startswith("[")]


def _role(client: redis.Redis) -> str:
    return str(client.info("replication")["role"])  # type: ignore[index]


def _bytes(client: redis.Redis, *command: str) -> bytes:
    connection = client.connection_pool.get_connection()
    try:
        connection.send_command(*command)
        answer: bytes = connection.read_response()
        return answer
    finally:
        client.connection_pool.release(connection)


@contextlib.contextmanager
def start_cluster(
    kind: str, directory: Path, masters: int = 3, replicas: int = 1, **options: Any
) -> Iterator[Cluster]:
    """Start masters with one replica each, or none; the slots are spread evenly."""
    with contextlib.closing(Cluster(kind, directory, [], replicas, **options)) as cluster:
        for _ in range(masters * (1 + replicas)):
            cluster.start_node()
        _join(cluster, masters)
        cluster.heal()
        yield cluster


def _join(cluster: Cluster, masters: int) -> None:
    clients = [cluster.client(server) for server in cluster.servers]
    for n, client in enumerate(clients):
        client.execute_command("CLUSTER SET-CONFIG-EPOCH", n + 1)
    for n, client in enumerate(clients[:masters]):
        # Rounded as redis-cli does.
        first, last = round(SLOTS * n / masters), round(SLOTS * (n + 1) / masters) - 1
        # Redis 6.2 has no ADDSLOTSRANGE.
        client.execute_command("CLUSTER ADDSLOTS", *range(first, last + 1))
    for server in cluster.servers[1:]:
        clients[0].execute_command("CLUSTER MEET", "127.0.0.1", server.port)
    wait_until(lambda: cluster._all_know(len(clients)), "all nodes know one another", 20)
    for n, client in enumerate(clients[masters:]):
        client.execute_command("CLUSTER REPLICATE", cluster.id_of(cluster.servers[n]))
    for client in clients:
        client.close()


def free_cluster_port() -> int:
    """A free port with a free port 10,000 above, where the nodes talk to one another.

    Both are below the ports that systems give to connections, so a node that is down gets them
    back.
    """
    ports = (random.randrange(11_000, 22_000) for _ in range(1_000))
    return next(port for port in ports if _is_free(port) and _is_free(port + 10_000))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _imports(node: redis.Redis, slot: int, source_id: str) -> bool:
    """Let a node import a slot; False while it does not know yet who owns it."""
    try:
        node.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source_id)
    except ResponseError as error:
        if not re.search("already the owner|know about node", str(error)):
            raise
        return False
    return True
