"""The cost of waiting: many consumers, many queues, a large backlog, and almost no work."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

from kombu import Connection, Queue

from tests.benchmarks.app import QUEUE
from tests.benchmarks.report import Figures, Line, benchmark, percentile
from tests.benchmarks.rig import Rig, Worker
from tests.benchmarks.workers import send_steadily
from tests.kit.proxy import Proxy
from tests.kit.wait import wait_until

FEW, MANY, PER_PROCESS = 10, 50, 10
IDLE_QUEUES = 1_000
FAR_QUEUES, ROUND_TRIP_SECONDS, RATE = 1_500, 0.004, 30
SPREAD_QUEUES, SHARDS = 20, 12

#: Kombu declares each queue in several round trips before a worker is ready.
READY_SECONDS = 300
_TICKS = os.sysconf("SC_CLK_TCK")


def consume(url: str, queues: Sequence[str], options: dict[str, Any]) -> None:
    """A plain Kombu consumer, running until it is killed."""
    with (
        Connection(url, transport_options=options) as connection,
        connection.Consumer(
            [Queue(name) for name in queues], callbacks=[lambda _, message: message.ack()]
        ) as consumer,
    ):
        consumer.qos(prefetch_count=4)
        print("ready", flush=True)
        while True:
            connection.drain_events()


def start_consumers(rig: Rig, count: int, queues: Sequence[str], shards: int = 1) -> None:
    for _ in range(count // PER_PROCESS):
        helper = rig.start("tests.benchmarks.idle", rig.url(), ",".join(queues), str(shards))
        assert helper.stdout is not None
        for _ in range(PER_PROCESS):
            helper.stdout.readline()


def count_commands(rig: Rig, seconds: float) -> tuple[float, float]:
    """Commands/s of clients, and of the scripts among them, from the server's MONITOR."""
    by_clients = by_scripts = 0
    end = time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", rig.server.port or 0)) as monitor:
        monitor.sendall(b"MONITOR\r\n")
        monitor.settimeout(0.1)
        rest = b""
        while time.monotonic() < end:
            try:
                *lines, rest = (rest + monitor.recv(65536)).split(b"\r\n")
            except TimeoutError:
                continue
            scripts = sum(b" lua] " in line for line in lines)
            by_scripts += scripts
            by_clients += sum(line != b"+OK" for line in lines) - scripts
    return by_clients / seconds, by_scripts / seconds


def trickle(url: str, stop: threading.Event) -> None:
    """One message due each second; the stock transport would hand it out at once."""
    with Connection(url) as connection:
        producer = connection.Producer(routing_key="idle")
        while not stop.wait(1):
            eta = datetime.now(timezone.utc) + timedelta(seconds=1)
            producer.publish("", headers={"eta": eta.isoformat()})


def commands_with(rig: Rig, more: int, consumers: int) -> tuple[float, float]:
    start_consumers(rig, more, ["idle"])
    wait_until(lambda: len(rig.redis.client_list()) > consumers, "all connect", 30)
    stop = threading.Event()
    publisher = threading.Thread(target=trickle, args=(rig.url(), stop))
    publisher.start()
    try:
        time.sleep(rig.scaled(30, 5))
        return count_commands(rig, rig.scaled(20.0, 5.0))
    finally:
        stop.set()
        publisher.join()


@benchmark(
    "idle",
    Line(
        f"commands/s of clients (+ within scripts): {MANY} idle consumers, one message due each "
        f"second; {FEW} consumers",
        "{many:.0f} (+{many_scripts:.0f}); {few:.0f} (+{few_scripts:.0f})",
        f"≤ 100; {MANY} to {FEW} < {MANY // FEW}",
        lambda f: f"{f['many'] / f['stock_many']:.2f}; {MANY} to {FEW} {f['many'] / f['few']:.1f}",
        lambda f: f["many"] <= 100 and f["many"] / f["few"] < MANY / FEW,
        "{stock_many:.0f} (+{stock_many_scripts:.0f}); {stock_few:.0f} (+{stock_few_scripts:.0f})",
    ),
    stock=True,
    rounds=1,
)
def idle(rig: Rig) -> Figures:
    few, few_scripts = commands_with(rig, FEW, FEW)
    many, many_scripts = commands_with(rig, MANY - FEW, MANY)
    return {"few": few, "few_scripts": few_scripts, "many": many, "many_scripts": many_scripts}


def names(count: int) -> list[str]:
    return [f"many-{n}" for n in range(count)]


def worker_of(rig: Rig, count: int, url: str | None = None) -> Worker:
    worker = rig.start_worker("-Q", ",".join(names(count)), url=url).await_ready(READY_SECONDS)
    time.sleep(rig.scaled(20, 5))
    return worker


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@benchmark(
    "many-queues",
    Line(
        f"a worker of {IDLE_QUEUES} idle queues: commands/s (of clients); of a core",
        "{commands:.0f} ({of_clients:.0f}); {percent:.1f} %",
        "≤ 30; ≤ 1 %",
        reached=lambda f: f["commands"] <= 30 and f["percent"] <= 1,
        stock="{stock_commands:.0f} ({stock_of_clients:.0f}); {stock_percent:.1f} %",
    ),
    stock=True,
    rounds=1,
)
def many_queues(rig: Rig) -> Figures:
    worker = worker_of(rig, rig.scaled(IDLE_QUEUES, 100))
    seconds, before = rig.scaled(30.0, 5.0), cpu_seconds(worker.pid)
    by_clients, by_scripts = count_commands(rig, seconds)
    percent = (cpu_seconds(worker.pid) - before) / seconds * 100
    return {"commands": by_clients + by_scripts, "of_clients": by_clients, "percent": percent}


def _to_any(queues: int, chance: random.Random, number: int) -> dict[str, Any]:
    """Every other task has a countdown."""
    countdown = {"countdown": chance.uniform(1, 5)} if number % 2 else {}
    return {"queue": f"many-{chance.randrange(queues)}", **countdown}


@benchmark(
    "many-queues-far",
    Line(
        f"a worker of {FAR_QUEUES} queues, {ROUND_TRIP_SECONDS * 1000:.0f} ms a round trip, "
        f"{RATE} tasks/s: lateness of start p99, tasks for now; delayed",
        "{now_ms:.0f}; {delayed_ms:.0f} ms",
        "≤ 100; ≤ 100 ms",
        reached=lambda f: f["now_ms"] <= 100 and f["delayed_ms"] <= 100,
        stock="{stock_now_ms:.0f}; {stock_delayed_ms:.0f} ms",
    ),
    stock=True,
    rounds=1,
)
def many_queues_far(rig: Rig) -> Figures:
    queues, count = rig.scaled(FAR_QUEUES, 100), rig.scaled(40, 5) * RATE
    with Proxy(rig.server.port or 0, delay_seconds=ROUND_TRIP_SECONDS / 2) as proxy:
        worker_of(rig, queues, rig.url(proxy.port))
        options = partial(_to_any, queues)
        rig.apart(send_steadily, rig.url(), count, RATE, options, seconds=300)
        rig.await_done(count, 120)
    late = {start.number: (start.at - start.due) * 1000 for start in rig.starts()}
    return {
        "now_ms": percentile([ms for number, ms in late.items() if number % 2 == 0], 0.99),
        "delayed_ms": percentile([ms for number, ms in late.items() if number % 2], 0.99),
    }


@benchmark(
    "many-queues-shards",
    Line(
        f"{MANY} idle consumers of {SPREAD_QUEUES} queues (ours: of {SHARDS} shards each): "
        "commands/s (of clients)",
        "{commands:.0f} ({of_clients:.0f})",
        "≤ 2000",
        reached=lambda f: f["commands"] <= 2_000,
        stock="{stock_commands:.0f} ({stock_of_clients:.0f})",
    ),
    stock=True,
    rounds=1,
)
def many_queues_shards(rig: Rig) -> Figures:
    start_consumers(rig, rig.scaled(MANY, PER_PROCESS), names(SPREAD_QUEUES), SHARDS)
    time.sleep(rig.scaled(30, 5))
    by_clients, by_scripts = count_commands(rig, rig.scaled(30.0, 5.0))
    return {"commands": by_clients + by_scripts, "of_clients": by_clients}


@benchmark(
    "memory",
    Line(
        "memory of a worker with a backlog of {count:,.0f} delayed tasks",
        "{before_mib:.0f} {growth_mib:+.1f} MiB",
        "no growth",
        reached=lambda f: f["growth_mib"] <= 2,  # below this it is the allocator's
        stock="{stock_before_mib:.0f} {stock_growth_mib:+.1f} MiB",
    ),
    Line(
        "the same: memory of the server for each of them",
        "{server_bytes:,.0f} B",
        "no more",
        reached=lambda f: f["server_bytes"] <= f["stock_server_bytes"],
        stock="{stock_server_bytes:,.0f} B",
    ),
    stock=True,
    rounds=1,
)
def memory(rig: Rig) -> Figures:
    count, warm_up = rig.scaled(100_000, 5_000), 500
    worker = rig.start_worker().await_ready()
    rig.send(((), {}) for _ in range(warm_up))
    rig.await_done(warm_up, 30)
    before, server_before = _settled_mib(worker), rig.redis.info("memory")["used_memory"]
    rig.send(((), {"countdown": 86_400}) for _ in range(count))
    wait_until(lambda: rig.redis.llen(QUEUE) == 0, "the ready list is empty", 240, 0.1)
    growth = _settled_mib(worker) - before
    server_growth = rig.redis.info("memory")["used_memory"] - server_before
    return {
        "before_mib": before,
        "growth_mib": growth,
        "server_bytes": server_growth / count,
        "count": count,
    }


def _settled_mib(worker: Worker) -> float:
    time.sleep(3)
    pages = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    url, queues, shards = sys.argv[1:]
    options = (
        {"delayed_shards": int(shards)} if url.startswith("delayed+") and shards != "1" else {}
    )
    for _ in range(PER_PROCESS):
        threading.Thread(target=consume, args=(url, queues.split(","), options)).start()
