"""A large queue moves to another node, or to a newer format, while its tasks come and go.

It moves to another node once as `redis-cli --cluster reshard` does it, key by key, and once by the
servers themselves, with CLUSTER MIGRATESLOTS. Servers, worker, sender and redis-cli share one
machine.
"""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from ctypes.util import find_library
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from celery_ext import Delayed
from kombu_delayed.inspection.doctor import upgrade
from tests.benchmarks.app import QUEUE, create_app
from tests.benchmarks.forms import schedule
from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import Rig, fill, sample, store_of
from tests.kit.clusters import PASSWORD, Cluster, start_cluster
from tests.kit.servers import Server
from tests.kit.wait import wait_until

NODES = 3
#: Tasks per second of the queue that moves; every other one has a countdown.
RATE, COUNTDOWN = 50, 1.0
PROBE_SECONDS = 0.005
MOST_MS = 100
#: While its slot moves key by key, a queue accepts nothing.
PATIENT = {"max_retries": 100}
#: How long the load runs before a move.
CALM_SECONDS = 5.0
#: A move may take this long.
MOVE_SECONDS = 600
KEY = f"{{{QUEUE}}}"

Move = Callable[[Cluster, Server, Server], None]


@dataclass
class Load:
    """Tasks that are sent to a queue, and how long each client waits for a node."""

    app: Any
    over: threading.Event = field(default_factory=threading.Event)
    #: Seconds of a PING of each node every 5 ms, and of `apply_async`, which waits while its queue
    #: is moving.
    pings: list[float] = field(default_factory=list)
    sends: list[float] = field(default_factory=list)

    def send(self) -> None:
        """Send until `over` is set, at a steady rate."""
        began = time.monotonic()
        for n in count():
            if self.over.wait(max(began + n / RATE - time.monotonic(), 0)):
                return
            countdown = COUNTDOWN * (n % 2)
            asked = time.monotonic()
            self.app.tasks["work"].apply_async(
                (n, time.time() + countdown), countdown=countdown, retry_policy=PATIENT
            )
            self.sends.append(time.monotonic() - asked)

    def probe(self, client: redis.Redis) -> None:
        while not self.over.wait(PROBE_SECONDS):
            asked = time.monotonic()
            with suppress(RedisError):  # one without slots becomes a replica, and loads its data
                client.ping()
            self.pings.append(time.monotonic() - asked)


@contextmanager
def loaded(app: Any, clients: Sequence[redis.Redis]) -> Iterator[Load]:
    """Load until the end of the block, from threads that have ended by then."""
    load = Load(app)
    probes = [partial(load.probe, client) for client in clients]
    threads = [threading.Thread(target=load.send), *(threading.Thread(target=p) for p in probes)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.over.set()
        for thread in threads:
            thread.join()


def by_redis_cli(cluster: Cluster, home: Server, away: Server) -> None:
    """Move all slots of a node to another one, key by key."""
    slots = len(cluster.slots_of(home))
    command = ["redis-cli", "-a", PASSWORD, "--no-auth-warning", "--cluster", "reshard"]
    command += [f"127.0.0.1:{home.port}", "--cluster-slots", str(slots), "--cluster-yes"]
    command += ["--cluster-from", cluster.id_of(home), "--cluster-to", cluster.id_of(away)]
    command += ["--cluster-pipeline", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOVE_SECONDS)
    if done.returncode:
        raise RuntimeError(f"redis-cli has not moved the slots: {done.stdout[-500:]}")


def by_the_servers(cluster: Cluster, home: Server, away: Server) -> None:
    """Move the slot of the queue at once, as Valkey 9 can."""
    slot = key_slot(KEY.encode())
    with cluster.client(home) as client:
        where = "SLOTSRANGE", slot, slot, "NODE", cluster.id_of(away)
        client.execute_command("CLUSTER MIGRATESLOTS", *where)
    has_moved = lambda: cluster.master_of(KEY) is away  # noqa: E731
    wait_until(has_moved, "the slot has moved", MOVE_SECONDS, interval_seconds=0.2)


def watched(
    rig: Rig, app: Any, url: str, clients: Sequence[redis.Redis], move: Callable[[], object]
) -> Figures:
    """The effect of a move on clients in ms, and its duration in seconds.

    Raises AssertionError if a task is lost or runs twice, or a message is gone.
    """
    with closing(Delayed(app)) as delayed:
        before = delayed.counts()[QUEUE].delayed
        worker = rig.start_worker(url=url).await_ready()
        with loaded(app, clients) as load:
            time.sleep(CALM_SECONDS)
            load.pings.clear()
            began = time.monotonic()
            move()
            seconds = time.monotonic() - began
        sent = len(load.sends)
        wait_until(lambda: worker.count() >= sent, "all tasks have run", 60)
        starts = worker.starts()
        worker.kill()
        found = sorted(start.number for start in starts)
        assert found == [*range(sent)], "a task was lost or has run twice"
        kept = delayed.counts()[QUEUE].delayed
        assert kept == before, f"{before - kept} of {before} messages are gone"
    late = max(start.at - start.due for start in starts)
    waits = {"stall": max(load.pings), "send": max(load.sends), "late": late}
    return {"seconds": seconds, **{name: 1000 * value for name, value in waits.items()}}


def jemalloc() -> dict[str, str]:
    """The environment of a server with jemalloc, as production servers have.

    With it, the bundled server deletes all keys of a slot in a tenth of the time.
    """
    library = find_library("jemalloc")
    if library is None:
        raise RuntimeError("jemalloc is not installed: apt-get install libjemalloc2")
    return {"LD_PRELOAD": library}


def moved(rig: Rig, cluster: Cluster, move: Move) -> Figures:
    """Move the queue from its node to the next one."""
    url = f"delayed+{cluster.url}"
    home = cluster.master_of(KEY)
    away = next(node for node in cluster.masters() if node is not home)
    clients = [cluster.client(node) for node in cluster.servers]
    with create_app(url) as app:
        return watched(rig, app, url, clients, partial(move, cluster, home, away))


def _line(name: str, what: str, form: str = "delayed") -> Line:
    return Line(
        f"the longest that a client of any node waits while a queue with {{count:,.0f}} {form} "
        f"messages moves to another node, {what}; servers with jemalloc",
        f"{{{name}_stall:.0f}} ms",
        f"≤ {MOST_MS} ms",
        reached=lambda f: f[f"{name}_stall"] <= MOST_MS,
    )


def _more(name: str) -> Line:
    return Line(
        "the same: how long the move takes; of that queue's own tasks, "
        f"{RATE} a second, the longest `apply_async` and the latest start",
        f"{{{name}_seconds:.0f}} s; {{{name}_send:.0f}} ms, {{{name}_late:.0f}} ms",
    )


@benchmark(
    "reshard",
    _line("cli", "by `redis-cli --cluster reshard --cluster-pipeline 1`"),
    _more("cli"),
    _line("servers", "by Valkey's CLUSTER MIGRATESLOTS"),
    _more("servers"),
    rounds=1,
)
def reshard(rig: Rig) -> Figures:
    """There and back. No task may be lost or run twice, and no message may be gone."""

    def fill_up(delayed: Delayed, count: int) -> None:
        fill(delayed.store, QUEUE, count, sample(rig))

    return resharded(rig, fill_up, {"cli": by_redis_cli, "servers": by_the_servers})


@benchmark(
    "reshard-zstd",
    _line("servers", "by Valkey's CLUSTER MIGRATESLOTS", "compressed"),
    _more("servers"),
    rounds=1,
)
def reshard_compressed(rig: Rig) -> Figures:
    """The server has less memory to fork and to copy, and as many messages to delete."""

    def fill_up(delayed: Delayed, count: int) -> None:
        delayed.app.conf.broker_transport_options = {"delayed_compression": "zstd"}
        schedule(delayed, count, random.Random(1))

    return resharded(rig, fill_up, {"servers": by_the_servers})


def resharded(rig: Rig, fill_up: Callable[[Delayed, int], None], moves: dict[str, Move]) -> Figures:
    count = rig.scaled(5_000_000, 20_000)
    directory, environment = rig.directory / "cluster", jemalloc()
    with start_cluster(
        "valkey", directory, NODES, 0, append_only=False, environment=environment
    ) as cluster:
        with create_app(f"delayed+{cluster.url}") as app, closing(Delayed(app)) as delayed:
            fill_up(delayed, count)
        found = {name: moved(rig, cluster, move) for name, move in moves.items()}
    flat = {f"{name}_{key}": f for name, figures in found.items() for key, f in figures.items()}
    return {"count": float(count), **flat}


@benchmark(
    "upgrade",
    Line(
        "`doctor --upgrade` of a queue with {count:,.0f} delayed messages in format 1: the longest "
        "that a client waits for the server",
        "{stall:.0f} ms",
        f"≤ {MOST_MS} ms",
        reached=lambda f: f["stall"] <= MOST_MS,
    ),
    Line(
        f"the same: how long it takes; of that queue's own tasks, {RATE} a second, the longest "
        "`apply_async` and the latest start",
        "{seconds:.0f} s; {send:.0f} ms, {late:.0f} ms",
    ),
    rounds=1,
)
def upgrade_format(rig: Rig) -> Figures:
    """No task may be lost or run twice, and no message may be gone."""
    count, old = rig.scaled(1_000_000, 20_000), store_of(rig)
    rig.redis.set("kombu-delayed:format", "1.0")
    old.bucket_bytes = 0
    fill(old, QUEUE, count, sample(rig))
    with closing(Delayed(rig.app)) as delayed:
        move = partial(upgrade, delayed.store, [QUEUE])
        figures = watched(rig, rig.app, rig.url(), [rig.server.client()], move)
    assert rig.redis.hlen(f"{{{QUEUE}}}:messages") < count / 2
    return {"count": float(count), **figures}
