"""A worker hears and is on time, whatever has happened to its pool and its connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from tests.kit.epolls import children, ghosts
from tests.kit.ledger import Ledger
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

#: A worker that is not woken looks for messages by itself after 42 s at the earliest, and one that
#: waits for an answer that does not come waits for 25 s.
POLL_SECONDS = 60
LIMIT_SECONDS = 15

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


@dataclass
class Bench:
    """A worker on a server of its own."""

    server: Server
    worker: Worker
    app: Celery
    ledger: Ledger

    def control(self, command: str, **arguments: Any) -> None:
        """Send a remote command and wait until it was carried out."""
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

    def check(self, after: str) -> None:
        """What has to hold at any time."""
        wait_until(
            lambda: self.app.control.ping([self.worker.name], timeout=1),
            f"an answer to a ping after {after}",
            LIMIT_SECONDS,
        )
        id = self.app.send_task("record", countdown=0.3).id
        wait_until(lambda: self.ledger.of(id), f"a delayed task after {after}", LIMIT_SECONDS)
        wait_until(
            lambda: not ghosts(self.worker.pid),
            f"no ghost after {after}: {ghosts(self.worker.pid)}",
            5,
        )


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
    before = children(bench.worker.pid)
    bench.control("pool_shrink", n=1)
    wait_until(lambda: before - children(bench.worker.pid), "a process of the pool has ended", 30)


def pool_restart(bench: Bench) -> None:
    with bench.child_replaced():
        bench.control("pool_restart")
        for _ in range(4 * len(children(bench.worker.pid))):  # a process ends after a task
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
    """A sequence in which each step follows each one, itself too: a de Bruijn sequence."""
    found: list[Step] = []
    for at, step in enumerate(steps):
        found.append(step)
        for other in steps[at + 1 :]:
            found += [step, other]
    return [*found, steps[0]]


def run(bench: Bench, steps: list[Step]) -> None:
    bench.check("its start")
    before = "its start"
    for step in steps:
        step(bench)
        after = f"{before}, {step.__name__}"
        bench.check(after)
        before = step.__name__


@pytest.mark.parametrize("pool", WORKERS)
def test_a_worker_hears_after_what_is_known_to_hurt(pool: str, tmp_path: Path) -> None:
    with bench_of(pool, tmp_path) as bench:
        run(bench, SHORT.get(pool, STEPS[pool]))


@pytest.mark.slow
@pytest.mark.parametrize("pool", WORKERS)
def test_a_worker_hears_after_each_pair_of_disturbances(pool: str, tmp_path: Path) -> None:
    with bench_of(pool, tmp_path) as bench:
        run(bench, each_pair(STEPS[pool]))
