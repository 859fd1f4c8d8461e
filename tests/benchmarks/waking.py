"""The cost for a node of waking one of many idle consumers of a queue, in four ways."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import redis

from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import Rig, cpu_seconds
from tests.kit.clusters import PASSWORD, start_cluster

KEYS = ("{waking}", "{waking}:wake")

#: Number of consumers -> number of messages that they are woken for.
ROUNDS = {1: 4_000, 10: 1_500, 100: 300}

#: The scores of waiting consumers are higher than those of all tokens.
WAITING = 10**16

PUT = "redis.call('LPUSH', KEYS[1], ARGV[1]) "
TOKEN = "redis.call('ZADD', KEYS[2], 0, 'now')"
TELL_ONE = f"""{TOKEN}
local who = redis.call('ZRANGEBYSCORE', KEYS[2], {WAITING}, '+inf', 'LIMIT', 0, 1)[1]
if who then
    redis.call('ZREM', KEYS[2], who)
    if redis.call('SPUBLISH', KEYS[2] .. who, '0') > 0 then redis.call('ZREM', KEYS[2], 'now') end
end"""
TELL_ALL = f"if {TOKEN} == 1 then redis.call('SPUBLISH', KEYS[2], '0') end"
TAKE = "local found = redis.call('RPOP', KEYS[1]) redis.call('ZREM', KEYS[2], 'now') "
WAIT = "redis.call('ZADD', KEYS[2], ARGV[1], ARGV[2]) "
FOUND = "return found"


class Ears(NamedTuple):
    """One consumer: a waiting connection, one for commands, and its number."""

    waits: redis.Connection
    commands: redis.Connection
    number: int

    def hear(self, *command: Any) -> Any:
        self.waits.send_command(*command)
        return self.waits.read_response()

    def ask(self, *command: Any) -> Any:
        self.commands.send_command(*command)
        return self.commands.read_response()


def _track(ears: Ears) -> None:
    id = ears.hear("CLIENT", "ID")
    ears.hear("SUBSCRIBE", "__redis__:invalidate")
    ears.ask("CLIENT", "TRACKING", "ON", "REDIRECT", id)
    _look(ears)


def _look(ears: Ears) -> None:
    ears.ask("EXISTS", KEYS[1])


def _block(ears: Ears) -> None:
    ears.waits.send_command("BZPOPMIN", KEYS[1], 0)


@dataclass(frozen=True)
class Way:
    """How consumers wait. `listen` runs once, `again` after each wake-up."""

    what: str
    put: str
    take: str
    listen: Callable[[Ears], Any]
    again: Callable[[Ears], None] = lambda ears: None
    wakes_all: bool = False


WAYS = {
    "blocked": Way("`BZPOPMIN`", PUT + TOKEN, TAKE + FOUND, _block, _block),
    "told": Way(
        "told in turn (ours)",
        PUT + TELL_ONE,
        TAKE + WAIT + FOUND,
        lambda ears: ears.hear("SSUBSCRIBE", f"{KEYS[1]}>{ears.number}"),
    ),
    "all": Way(
        "all are told",
        PUT + TELL_ALL,
        TAKE + FOUND,
        lambda ears: ears.hear("SSUBSCRIBE", KEYS[1]),
        wakes_all=True,
    ),
    "cached": Way("client-side caching", PUT + TOKEN, TAKE + FOUND, _track, _look, True),
}


class Waking:
    """Waiting consumers of one queue, and a producer."""

    def __init__(self, client: redis.Redis, port: int, way: Way, consumers: int) -> None:
        self._client, self._way = client, way
        self._put = client.register_script(way.put)
        self._take = client.script_load(way.take)
        self._asked = WAITING
        self._ears: dict[int, Ears] = {}
        self._poll = select.poll()
        client.flushall()
        for number in range(consumers):
            ears = Ears(_connect(port), _connect(port), number)
            way.listen(ears)
            self._claim(ears)
            self._ears[ears.waits._sock.fileno()] = ears
            self._poll.register(ears.waits._sock, select.POLLIN)

    def _claim(self, ears: Ears) -> Any:
        self._asked += 2
        return ears.ask("EVALSHA", self._take, 2, *KEYS, self._asked, f">{ears.number}")

    def run(self, rounds: int) -> tuple[float, float]:
        """µs of the server per message, and until a consumer has it."""
        began = cpu_seconds(self._client)
        took = [self._wake_one(n) for n in range(rounds)]
        return (cpu_seconds(self._client) - began) / rounds * 1e6, median(took) * 1e6

    def _wake_one(self, n: int) -> float:
        sent_at = time.perf_counter()
        self._put(keys=[*KEYS], args=[n])
        left, took = len(self._ears) if self._way.wakes_all else 1, 0.0
        while left > 0 or not took:
            for fd, _ in self._poll.poll(1_000):
                ears = self._ears[fd]
                ears.waits.read_response()
                left -= 1
                if self._claim(ears) is not None:
                    took = time.perf_counter() - sent_at
                self._way.again(ears)
        return took

    def close(self) -> None:
        for ears in self._ears.values():
            ears.waits.disconnect()
            ears.commands.disconnect()


def _connect(port: int) -> redis.Connection:
    connection = redis.Connection(host="127.0.0.1", port=port, password=PASSWORD, protocol=2)
    connection.connect()
    return connection


def _line(name: str, way: Way) -> Line:
    def shown(figure: str) -> str:
        return ", ".join(f"{{{name}_{consumers}_{figure}:.0f}}" for consumers in ROUNDS)

    return Line(
        f"one of {', '.join(map(str, ROUNDS))} idle consumers is woken, {way.what}: processor "
        "time of the server; until it has the message",
        f"{shown('us')}; {shown('took_us')} µs",
    )


@benchmark("waking", *(_line(name, way) for name, way in WAYS.items()), rounds=1)
def waking(rig: Rig) -> Figures:
    """On a Cluster of one node."""
    figures: Figures = {}
    with (
        start_cluster("valkey", rig.directory / "node", 1, 0, append_only=False) as cluster,
        cluster.client(cluster.servers[0]) as client,
    ):
        for consumers, rounds in ROUNDS.items():
            for name, way in WAYS.items():
                found = Waking(client, cluster.servers[0].port or 0, way, consumers)
                cost, took = found.run(rig.scaled(rounds, rounds // 10))
                found.close()
                figures |= {f"{name}_{consumers}_us": cost, f"{name}_{consumers}_took_us": took}
    return figures
