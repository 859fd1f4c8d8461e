"""The cost of waiting for a replica, and the losses, repeats and delays of Sentinel failovers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from tests.benchmarks.app import OPTIONS
from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import Rig
from tests.benchmarks.workers import in_batch, singly
from tests.kit.ledger import Ledger
from tests.kit.producers import Producers
from tests.kit.sentinels import DOWN_AFTER_MS, UNHURRIED, Group, start_group
from tests.kit.servers import start_server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

KINDS = {"alone": singly, "batch": in_batch}
WAITING = {"delayed_replicas_to_wait": 1}

#: Three threads each send a task every 0.1 s, due now (None) or after one of these countdowns.
THREADS, PAUSE_SECONDS, COUNTDOWNS = 3, 0.1, (None, 0.5, 3, 8)

SETTLE_SECONDS = 20


def waiting(url: str, count: int, kind: str) -> float:
    """Tasks per second that are sent and stored on one replica; in a process of its own."""
    os.environ[OPTIONS] = json.dumps(WAITING)
    return KINDS[kind](url, count)


def _waits(kind: str, what: str) -> Line:
    return Line(
        f"{what}, waiting for one replica; for none",
        f"{{{kind} 1:,.0f}}/s; {{{kind} 0:,.0f}}/s",
        ratio=(f"{kind} 1", f"{kind} 0"),
    )


@benchmark(
    "replicas",
    _waits("alone", "`apply_async(countdown=…)` from one process"),
    _waits("batch", "the same within `Producer.batch()`"),
)
def replicas(rig: Rig) -> Figures:
    """The sides alternate, on a master with a replica in either case."""
    counts = {"alone": rig.scaled(4_000, 500), "batch": rig.scaled(20_000, 2_000)}
    follows = {"replicaof": f"127.0.0.1 {rig.server.port}", "repl-diskless-sync-delay": "0"}
    figures: Figures = {}
    with start_server("valkey", rig.directory / "replica", port=0, config=follows):
        wait_until(lambda: rig.redis.wait(1, 100), "the replica is in touch", 30)
        for kind, count in counts.items():
            figures[f"{kind} 0"] = rig.apart(KINDS[kind], rig.url(), count)
            figures[f"{kind} 1"] = rig.apart(waiting, rig.url(), count, kind)
    return figures


class Sent(NamedTuple):
    began_at: float
    at: float
    id: str


class Load(NamedTuple):
    ledger: Ledger
    producers: Producers

    @property
    def sent(self) -> list[Sent]:
        return self.producers.sent


@contextmanager
def loaded(
    rig: Rig, group: Group, options: dict[str, Any], *, workers: int = 2, threads: int = THREADS
) -> Iterator[Load]:
    """Workers of two processes each on a group of servers, and threads to send them tasks."""
    ledger = Ledger(rig.directory / "ledger")
    url = f"delayed+{group.url}"
    url = url if rig.side == "ours" else url.replace("delayed+", "")
    settings = Settings(url, None, {**group.options, **options}, str(ledger.path))
    countdowns, pause_seconds = (COUNTDOWNS, PAUSE_SECONDS) if threads > 1 else ((None,), 0.02)
    with ExitStack() as stack:
        app = stack.enter_context(make_app(settings))
        for n in range(workers):
            worker = Worker(settings, rig.directory, name=f"w{n}", pool="prefork", concurrency=2)
            stack.callback(worker.kill)
            worker.start()

        def send(n: int) -> Sent:
            began_at, countdown = time.time(), countdowns[n % len(countdowns)]
            result = app.send_task("record", countdown=countdown, retry=False)
            return Sent(began_at, time.time(), result.id)

        yield Load(ledger, Producers(send, threads, pause_seconds))


@benchmark(
    "failover",
    Line(
        "SIGKILL of the master until the Sentinels name the next one "
        f"(`down-after-milliseconds {DOWN_AFTER_MS}`)",
        "{named:.1f} s",
    ),
    Line("until the next task is accepted; until it runs", "{accepted:.1f} s; {run:.1f} s"),
)
def failover(rig: Rig) -> Figures:
    """Seconds from SIGKILL of the master to the next one, the next accepted task and its run."""
    with (
        start_group("valkey", rig.directory / "group") as group,
        loaded(rig, group, WAITING, workers=1, threads=1) as load,
        load.producers,
    ):
        load.ledger.wait_for(20)
        killed_at = time.time()
        group.wait_for_failover(group.kill_master(), 60)
        named_at = time.time()
        accepted = lambda: next((s for s in load.sent if s.began_at > killed_at), None)  # noqa: E731
        sent = wait_until(accepted, "a task is accepted", 60)
        assert sent is not None
        load.ledger.wait_for_all([sent.id], 60)
        (run, *_) = load.ledger.of(sent.id)
    return {
        "named": named_at - killed_at,
        "accepted": sent.at - killed_at,
        "run": run["at"] - killed_at,
    }


def switched(rig: Rig, options: dict[str, Any]) -> Figures:
    """A promotion amid some 700 messages, with two workers of two processes each."""
    with start_group("valkey", rig.directory / "group") as group:
        group.pace(UNHURRIED)
        with loaded(rig, group, options) as load:
            with load.producers:
                time.sleep(10)
                switched_at = _switch(group)
                time.sleep(5)
            wanted, end = {each.id for each in load.sent}, time.time() + SETTLE_SECONDS
            over = lambda: wanted <= set(load.ledger.ids()) or time.time() > end  # noqa: E731
            wait_until(over, "the end", SETTLE_SECONDS + 5, 0.2)
    runs = load.ledger.runs()
    ran_at = sorted(entry["at"] for entry in load.ledger.entries())
    sent_at = sorted(each.at for each in load.sent)
    return {
        "sent": len(load.sent),
        "errors": load.producers.errors,
        "lost": sum(not runs[each.id] for each in load.sent),
        "twice": sum(runs[each.id] > 1 for each in load.sent),
        "next": next(at for at in ran_at if at > switched_at) - switched_at,
        "pause": max(b - a for a, b in pairwise(sent_at)),
    }


def _switch(group: Group) -> float:
    """Promote a replica and wait until the old master is one; returns when the new was named."""
    old = group.switch()
    switched_at = time.time()
    wait_until(lambda: not group.is_master(old), "the old master is a replica", 60, 0.05)
    return switched_at


TOLD = (
    "{lost:.0f} lost, {twice:.0f} twice of {sent:,.0f}; {errors:.0f} errors; next after "
    "{next:.1f} s, sending paused {pause:.1f} s"
)


@benchmark(
    "switch",
    Line(
        "`SENTINEL FAILOVER` under 30 messages/s, without waiting for replicas",
        TOLD,
        "0 lost",
        reached=lambda f: not f["lost"],
        stock=TOLD.replace("{", "{stock_"),
    ),
    stock=True,
)
def switch(rig: Rig) -> Figures:
    return switched(rig, {})


@benchmark(
    "switch-replicas",
    Line(
        "the same with `delayed_replicas_to_wait: 1`",
        TOLD,
        "0 lost, 0 twice",
        reached=lambda f: not f["lost"],
    ),
)
def switch_replicas(rig: Rig) -> Figures:
    return switched(rig, WAITING)
