"""What waiting costs: commands per second with many consumers and next to nothing to do."""

from __future__ import annotations

import socket
import sys
import threading
import time
from datetime import datetime, timedelta, timezone

from kombu import Connection, Producer, Queue

from tests.benchmarks.report import Benchmark, Figures, Row
from tests.benchmarks.rig import START_SECONDS, Rig
from tests.kit.wait import wait_until

LIMIT = 100
FEW, MANY = 10, 50
PER_PROCESS = 10
QUEUE = Queue("idle")


def consume(url: str) -> None:
    """A plain Kombu consumer, for good."""
    with Connection(url) as connection:
        consumer = connection.Consumer([QUEUE], callbacks=[lambda _, message: message.ack()])
        consumer.qos(prefetch_count=4)
        with consumer:
            print("ready", flush=True)
            while True:
                connection.drain_events()


def count_commands(port: int, seconds: float) -> tuple[int, int]:
    """Commands of clients, and of the scripts among them, as the server's MONITOR shows them."""
    by_clients = by_scripts = 0
    end = time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", port)) as monitor:
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
    return by_clients, by_scripts


def trickle(url: str, stop: threading.Event) -> None:
    """One message due each second; the stock transport would hand it out at once."""
    with Connection(url) as connection:
        producer = Producer(connection.channel(), routing_key=QUEUE.name)
        while not stop.wait(1):
            eta = datetime.now(timezone.utc) + timedelta(seconds=1)
            producer.publish("", headers={"eta": eta.isoformat()})


def measure_with(rig: Rig, consumers: int) -> tuple[float, float]:
    """Commands per second, of clients and of scripts, with so many consumers in all."""
    seconds = rig.scaled(20.0, 5.0)
    while len(rig.helpers) < consumers // PER_PROCESS:
        helper = rig.start("tests.benchmarks.idle", rig.url(), str(PER_PROCESS))
        assert helper.stdout is not None
        for _ in range(PER_PROCESS):
            helper.stdout.readline()
        rig.helpers.append(helper)
    wait_until(lambda: len(rig.redis.client_list()) > consumers, "all connect", START_SECONDS)
    stop = threading.Event()
    publisher = threading.Thread(target=trickle, args=(rig.url(), stop))
    publisher.start()
    try:
        time.sleep(rig.scaled(30, 5))
        by_clients, by_scripts = count_commands(rig.server.port or 0, seconds)
    finally:
        stop.set()
        publisher.join()
    return by_clients / seconds, by_scripts / seconds


def measure(rig: Rig) -> Figures:
    few, many = measure_with(rig, FEW), measure_with(rig, MANY)
    return {
        "few": few[0],
        "few_scripts": few[1],
        "many": many[0],
        "many_scripts": many[1],
    }


def rows(stock: Figures, ours: Figures) -> list[Row]:
    growth = ours["many"] / ours["few"]
    return [
        Row(
            f"commands/s of clients (+ within scripts): {MANY} idle consumers, one message due "
            f"each second; {FEW} consumers",
            f"≤ {LIMIT}; {MANY} to {FEW} < {MANY // FEW}",
            _text(stock),
            _text(ours),
            f"{ours['many'] / stock['many']:.2f}; {MANY} to {FEW} {growth:.1f}",
            ours["many"] <= LIMIT and growth < MANY / FEW,
        )
    ]


def _text(f: Figures) -> str:
    return f"{f['many']:.0f} (+{f['many_scripts']:.0f}); {f['few']:.0f} (+{f['few_scripts']:.0f})"


BENCHMARKS = [Benchmark("idle", measure, rows, rounds=1)]

if __name__ == "__main__":
    for _ in range(int(sys.argv[2])):
        threading.Thread(target=consume, args=(sys.argv[1],)).start()
