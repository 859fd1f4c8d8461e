"""Everyday disturbances of a worker's pool and connections, and whether it keeps working."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery

from tests.kit.epolls import children, ghosts
from tests.kit.ledger import Ledger
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

#: A worker that is not woken polls for messages after 42 s at the earliest, and waits 25 s for an
#: answer that does not arrive.
POLL_SECONDS = 60
LIMIT_SECONDS = 15
AHEAD_SECONDS = 0.3
HEED_SECONDS = 2
#: A ping is lost while the worker is not connected, so the first ones wait only this long.
PING_SECONDS = 0.2, 0.2, 0.4

WORKERS: dict[str, dict[str, Any]] = {
    "prefork": {"pool": "prefork", "concurrency": 2},
    "autoscaled": {"pool": "prefork", "options": ["--autoscale=2,2"]},
    "threads": {"pool": "threads", "concurrency": 2},
    "gevent": {"pool": "gevent", "concurrency": 10},
    "eventlet": {"pool": "eventlet", "concurrency": 10},
    "solo": {"pool": "solo"},
}
TASKS_PER_CHILD = 12
CHILD_MEBIBYTES = 200


class Signs(NamedTuple):
    """How soon a worker answered a ping after something, and how late it got a delayed task then.

    A task that it has received waits for Celery's pool, with any transport.
    """

    after: str
    ping_seconds: float
    late_seconds: float


@dataclass
class Bench:
    """A worker on a server of its own."""

    server: Server
    worker: Worker
    app: Celery
    ledger: Ledger

    def control(self, command: str, **arguments: Any) -> None:
        """Send a remote command and wait until the worker has carried it out."""
        replies = self.app.control.broadcast(
            command,
            arguments=arguments,
            destination=[self.worker.name],
            reply=True,
            timeout=LIMIT_SECONDS,
        )
        assert [list(reply[self.worker.name]) for reply in replies] == [["ok"]], replies

    def begin(self, name: str, *args: Any, **options: Any) -> str:
        """Send a task and wait until it has begun; returns its id."""
        task_id: str = self.app.send_task(name, args, **options).id
        wait_until(lambda: self.ledger.of(task_id), f"{name} has begun", LIMIT_SECONDS)
        return task_id

    @contextmanager
    def child_replaced(self) -> Iterator[None]:
        before = children(self.worker.pid)
        yield
        wait_until(
            lambda: before - children(self.worker.pid), "a process of the pool has ended", 30
        )
        wait_until(
            lambda: len(children(self.worker.pid)) >= len(before), "the pool has another one", 30
        )

    def check(self, after: str) -> Signs:
        """Checks that must succeed at any time."""
        began = time.monotonic()
        timeouts = chain(PING_SECONDS, repeat(2.0))
        wait_until(
            lambda: self.app.control.ping([self.worker.name], timeout=next(timeouts)),
            f"an answer to a ping after {after}",
            LIMIT_SECONDS,
        )
        answered = time.monotonic()
        sent_at = time.time()
        id = self.app.send_task("record", countdown=AHEAD_SECONDS).id
        wait_until(lambda: self.ledger.of(id), f"a delayed task after {after}", LIMIT_SECONDS)
        wait_until(
            lambda: not ghosts(self.worker.pid),
            f"no ghost after {after}: {ghosts(self.worker.pid)}",
            5,
        )
        late = self.received_at(id) - sent_at - AHEAD_SECONDS
        return Signs(after, answered - began, late)

    def received_at(self, id: str) -> float:
        """When the worker received a task, by its log: its pool may be replacing a process then."""
        line = next(each for each in self.worker.log.splitlines() if f"[{id}] received" in each)
        return datetime.strptime(line[1:24], "%Y-%m-%d %H:%M:%S,%f").timestamp()


@contextmanager
def bench_of(pool: str, directory: Path) -> Iterator[Bench]:
    config = {
        "worker_enable_remote_control": True,
        "worker_pool_restarts": True,
        "worker_max_tasks_per_child": TASKS_PER_CHILD,
        "worker_max_memory_per_child": CHILD_MEBIBYTES << 10,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "task_publish_retry_policy": {"max_retries": 100, "interval_max": 0.2},
    }
    ledger = Ledger(directory / "ledger")
    options = {"delayed_poll_seconds": POLL_SECONDS}
    kind = available_kinds()[0]
    with start_server(kind, directory / "server", port=0, append_only=True) as server:
        settings = Settings(f"delayed+{server.url}", None, options, str(ledger.path), config)
        worker = Worker(settings, directory, gossip=True, **WORKERS[pool])
        with worker, make_app(settings) as app:
            yield Bench(server, worker, app, ledger)


def time_limit(bench: Bench) -> None:
    with bench.child_replaced():
        bench.begin("sleep", 60, time_limit=1)


def terminate(bench: Bench) -> None:
    with bench.child_replaced():
        task_id = bench.begin("sleep", 60)
        bench.app.control.revoke(task_id, terminate=True, signal="SIGKILL")


def terminate_greenlet(bench: Bench) -> None:
    task_id = bench.begin("sleep", 60)
    bench.app.control.revoke(task_id, terminate=True)


def autoscale(bench: Bench) -> None:
    bench.control("autoscale", max=4, min=4)
    bench.control("autoscale", max=2, min=2)


def pool_grow(bench: Bench) -> None:
    bench.control("pool_grow", n=1)


def pool_shrink(bench: Bench) -> None:
    """The process that should go may already have ended, for another reason.

    A process that billiard has just forked ignores the signal, as it still has the worker's
    handler. Then each process is signalled in turn, and the pool replaces the others.
    """
    bench.control("pool_shrink", n=1)
    stats = bench.app.control.inspect([bench.worker.name], timeout=LIMIT_SECONDS).stats() or {}
    size = stats[bench.worker.name]["pool"]["max-concurrency"]
    tell_at, turn = time.monotonic() + HEED_SECONDS, count()

    def has_shrunk() -> bool:
        found = children(bench.worker.pid)
        if len(found) > size and time.monotonic() > tell_at:
            os.kill(sorted(found)[next(turn) % len(found)], signal.SIGTERM)
        return len(found) == size

    wait_until(has_shrunk, f"the pool has {size}", 30, 0.5)


def pool_restart(bench: Bench) -> None:
    with bench.child_replaced():
        bench.control("pool_restart")
        for _ in range(4 * len(children(bench.worker.pid))):  # a process ends only after a task
            bench.app.send_task("record")


def max_tasks_per_child(bench: Bench) -> None:
    with bench.child_replaced():
        for _ in range(TASKS_PER_CHILD * len(children(bench.worker.pid))):
            bench.app.send_task("record")


def max_memory_per_child(bench: Bench) -> None:
    with bench.child_replaced():
        bench.begin("fill_memory", CHILD_MEBIBYTES)


def add_consumer(bench: Bench) -> None:
    bench.control("add_consumer", queue="other")
    bench.begin("record", countdown=0.1, queue="other")


def cancel_consumer(bench: Bench) -> None:
    bench.control("cancel_consumer", queue="other")


def kill_normal(bench: Bench) -> None:
    with bench.server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def kill_pubsub(bench: Bench) -> None:
    with bench.server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")


def restart_server(bench: Bench) -> None:
    bench.server.restart()


Step = Callable[[Bench], None]

ANY_POOL: list[Step] = [add_consumer, cancel_consumer, kill_normal, kill_pubsub, restart_server]
REPLACING: list[Step] = [time_limit, terminate, max_tasks_per_child, max_memory_per_child]
STEPS: dict[str, list[Step]] = {
    "prefork": [*ANY_POOL, *REPLACING, pool_grow, pool_shrink, pool_restart],
    "autoscaled": [*ANY_POOL, *REPLACING, autoscale],
    "threads": ANY_POOL,
    "gevent": [*ANY_POOL, terminate_greenlet],
    "eventlet": [*ANY_POOL, terminate_greenlet],
    "solo": ANY_POOL,
}
SHORT: dict[str, list[Step]] = {
    "prefork": [
        *(time_limit, kill_normal, terminate, add_consumer, kill_normal, cancel_consumer),
        *(pool_grow, pool_shrink, kill_pubsub, pool_restart, restart_server),
    ],
    "autoscaled": [autoscale, kill_normal, autoscale, kill_pubsub],
}


def each_pair(steps: list[Step]) -> list[Step]:
    """A sequence in which each step follows each step, itself too: a de Bruijn sequence."""
    found: list[Step] = []
    for at, step in enumerate(steps):
        found.append(step)
        for other in steps[at + 1 :]:
            found += [step, other]
    return [*found, steps[0]]


def run(bench: Bench, steps: list[Step]) -> Iterator[Signs]:
    """Run the steps in order, and check the worker after each."""
    yield bench.check("its start")
    before = "its start"
    for step in steps:
        step(bench)
        yield bench.check(f"{before}, {step.__name__}")
        before = step.__name__
