"""How fast one worker gets through tasks that do nothing."""

from __future__ import annotations

from tests.benchmarks.app import batch
from tests.benchmarks.report import Benchmark, Figures, at_least
from tests.benchmarks.rig import Rig

#: The first ones pay for starting the worker and filling its prefetch buffer.
WARM_UP = 200
DELAY_MS = 1


def publish(rig: Rig, count: int) -> None:
    with batch(rig.app) as options:
        for _ in range(count):
            rig.app.tasks["work"].apply_async(**options)


def drain(rig: Rig, count: int, url: str) -> Figures:
    publish(rig, count)
    rig.start_worker(url=url)
    rig.await_done(count, 120)
    starts = rig.starts()
    return {"rate": (count - WARM_UP) / (starts[-1].at - starts[WARM_UP - 1].at)}


def measure_near(rig: Rig) -> Figures:
    return drain(rig, rig.scaled(10_000, 2_000), rig.url())


def measure_far(rig: Rig) -> Figures:
    return drain(rig, rig.scaled(4_000, 800), rig.url(proxy_port(rig)))


def proxy_port(rig: Rig) -> int:
    """The port of a proxy in a process of its own that delays each direction."""
    target = f"127.0.0.1:{rig.server.port}"
    proxy = rig.start("tests.kit.proxy", "--to", target, "--delay-ms", str(DELAY_MS))
    assert proxy.stdout is not None
    return int(proxy.stdout.readline().rpartition(b":")[2])


BENCHMARKS = [
    Benchmark(
        "throughput",
        measure_near,
        at_least("tasks that do nothing through one worker (prefork, `-c 2`)", "rate", 2.0),
    ),
    Benchmark(
        "throughput-delay",
        measure_far,
        at_least("the same with 1 ms of network delay each way", "rate", 3.0),
    ),
]
