"""What many queues cost a worker: while nothing happens, and when the server is far away."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path

from kombu import Connection, Queue

from tests.benchmarks.app import create_app
from tests.benchmarks.idle import count_commands
from tests.benchmarks.report import Benchmark, Figures, Row, percentile
from tests.benchmarks.rig import Rig, Worker
from tests.kit.proxy import Proxy
from tests.kit.wait import wait_until

IDLE_QUEUES, IDLE_LIMIT, IDLE_PERCENT = 1_000, 30, 1.0
FAR_QUEUES, ROUND_TRIP_SECONDS, RATE, FAR_MS = 1_500, 0.004, 30, 100
AHEAD_SECONDS = 5.0
CONSUMERS, PER_PROCESS, SPREAD_QUEUES, SHARDS, SPREAD_LIMIT = 50, 10, 20, 12, 2_000

#: Kombu declares each queue in several round trips before a worker is ready.
READY_SECONDS = 300
_TICKS = os.sysconf("SC_CLK_TCK")


def names(count: int) -> list[str]:
    return [f"many-{n}" for n in range(count)]


def worker_of(rig: Rig, count: int, url: str | None = None) -> Worker:
    worker = rig.start_worker("-Q", ",".join(names(count)), url=url)
    wait_until(worker._is_ready, f"a worker of {count} queues is ready", READY_SECONDS)
    time.sleep(rig.scaled(20, 5))
    return worker


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def measure_idle(rig: Rig) -> Figures:
    worker = worker_of(rig, rig.scaled(IDLE_QUEUES, 100))
    seconds = rig.scaled(30.0, 5.0)
    before = cpu_seconds(worker.pid)
    by_clients, by_scripts = count_commands(rig.server.port or 0, seconds)
    return {
        "commands": (by_clients + by_scripts) / seconds,
        "of_clients": by_clients / seconds,
        "percent": (cpu_seconds(worker.pid) - before) / seconds * 100,
    }


def idle_rows(stock: Figures, ours: Figures) -> list[Row]:
    return [
        Row(
            f"a worker of {IDLE_QUEUES} idle queues: commands/s (of clients); of a core",
            f"≤ {IDLE_LIMIT}; ≤ {IDLE_PERCENT:.0f} %",
            _idle(stock),
            _idle(ours),
            reached=ours["commands"] <= IDLE_LIMIT and ours["percent"] <= IDLE_PERCENT,
        )
    ]


def _idle(f: Figures) -> str:
    return f"{f['commands']:.0f} ({f['of_clients']:.0f}); {f['percent']:.1f} %"


def publish(url: str, count: int, queues: int) -> None:
    """Send tasks at a steady rate to any of the queues, each second one with a countdown."""
    work = create_app(url).tasks["work"]
    chance = random.Random(1)
    began = time.time()
    for number in range(count):
        time.sleep(max(began + number / RATE - time.time(), 0))
        ahead = chance.uniform(1, AHEAD_SECONDS) if number % 2 else 0.0
        due = time.time() + ahead
        queue = chance.choice(names(queues))
        work.apply_async((number, due), countdown=ahead or None, queue=queue)


def measure_far(rig: Rig) -> Figures:
    queues, count = rig.scaled(FAR_QUEUES, 100), rig.scaled(40, 5) * RATE
    with Proxy(rig.server.port or 0, delay_seconds=ROUND_TRIP_SECONDS / 2) as proxy:
        worker_of(rig, queues, rig.url(proxy.port))
        rig.apart(publish, rig.url(), count, queues, seconds=300)
        rig.await_done(count, 120)
    late = {start.number: (start.at - start.due) * 1000 for start in rig.starts()}
    return {
        "now_ms": percentile([ms for number, ms in late.items() if number % 2 == 0], 0.99),
        "delayed_ms": percentile([ms for number, ms in late.items() if number % 2], 0.99),
    }


def far_rows(stock: Figures, ours: Figures) -> list[Row]:
    return [
        Row(
            f"a worker of {FAR_QUEUES} queues, {ROUND_TRIP_SECONDS * 1000:.0f} ms a round trip, "
            f"{RATE} tasks/s: lateness of start p99, tasks for now; delayed",
            f"≤ {FAR_MS}; ≤ {FAR_MS} ms",
            f"{stock['now_ms']:.0f}; {stock['delayed_ms']:.0f} ms",
            f"{ours['now_ms']:.0f}; {ours['delayed_ms']:.0f} ms",
            reached=ours["now_ms"] <= FAR_MS and ours["delayed_ms"] <= FAR_MS,
        )
    ]


def consume(url: str) -> None:
    """A plain Kombu consumer of spread queues, for good."""
    spread = {"delayed_shards": SHARDS} if url.startswith("delayed+") else {}
    queues = [Queue(name) for name in names(SPREAD_QUEUES)]
    with (
        Connection(url, transport_options=spread) as connection,
        connection.Consumer(queues, callbacks=[lambda _, message: message.ack()]) as consumer,
    ):
        consumer.qos(prefetch_count=4)
        print("ready", flush=True)
        while True:
            connection.drain_events()


def measure_spread(rig: Rig) -> Figures:
    for _ in range(rig.scaled(CONSUMERS, PER_PROCESS) // PER_PROCESS):
        helper = rig.start("tests.benchmarks.many_queues", rig.url(), str(PER_PROCESS))
        assert helper.stdout is not None
        for _ in range(PER_PROCESS):
            helper.stdout.readline()
    time.sleep(rig.scaled(30, 5))
    seconds = rig.scaled(30.0, 5.0)
    by_clients, by_scripts = count_commands(rig.server.port or 0, seconds)
    return {"commands": (by_clients + by_scripts) / seconds, "of_clients": by_clients / seconds}


def spread_rows(stock: Figures, ours: Figures) -> list[Row]:
    return [
        Row(
            f"{CONSUMERS} idle consumers of {SPREAD_QUEUES} queues (ours: of {SHARDS} shards "
            "each): commands/s (of clients)",
            f"≤ {SPREAD_LIMIT}",
            f"{stock['commands']:.0f} ({stock['of_clients']:.0f})",
            f"{ours['commands']:.0f} ({ours['of_clients']:.0f})",
            reached=ours["commands"] <= SPREAD_LIMIT,
        )
    ]


BENCHMARKS = [
    Benchmark("many-queues", measure_idle, idle_rows, rounds=1),
    Benchmark("many-queues-far", measure_far, far_rows, rounds=1),
    Benchmark("many-queues-shards", measure_spread, spread_rows, rounds=1),
]

if __name__ == "__main__":
    for _ in range(int(sys.argv[2])):
        threading.Thread(target=consume, args=(sys.argv[1],)).start()
