"""What waiting for a replica costs, and how long a failover of Sentinel takes."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from kombu.exceptions import OperationalError

from tests.benchmarks.app import OPTIONS
from tests.benchmarks.publishing import in_batch, singly
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig
from tests.kit.ledger import Ledger
from tests.kit.sentinels import DOWN_AFTER_MS, start_group
from tests.kit.servers import start_server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

KINDS = {"alone": singly, "batch": in_batch}
WAITING = {"delayed_replicas_to_wait": 1}


def waiting(url: str, count: int, kind: str) -> float:
    """Tasks per second that are sent and that one replica has; in a process of its own."""
    os.environ[OPTIONS] = json.dumps(WAITING)
    return KINDS[kind](url, count)


def measure_replicas(rig: Rig) -> Figures:
    """Alternating, on a master with a replica in either case."""
    counts = {"alone": rig.scaled(4_000, 500), "batch": rig.scaled(20_000, 2_000)}
    follows = {"replicaof": f"127.0.0.1 {rig.server.port}", "repl-diskless-sync-delay": "0"}
    figures: Figures = {}
    with start_server("valkey", rig.directory / "replica", port=0, config=follows):
        wait_until(lambda: rig.redis.wait(1, 100), "the replica is in touch", 30)
        for kind, count in counts.items():
            figures[f"{kind} 0"] = rig.apart(KINDS[kind], rig.url(), count)
            figures[f"{kind} 1"] = rig.apart(waiting, rig.url(), count, kind)
    return figures


def replica_rows(ours: Figures) -> list[Row]:
    called = {
        "alone": "`apply_async(countdown=…)` from one process",
        "batch": "the same within `Producer.batch()`",
    }
    return [
        Row(
            f"{called[kind]}, waiting for one replica; for none",
            NOTHING,
            NOTHING,
            f"{ours[f'{kind} 1']:,.0f}/s; {ours[f'{kind} 0']:,.0f}/s",
            f"{ours[f'{kind} 1'] / ours[f'{kind} 0']:.2f}",
        )
        for kind in called
    ]


def measure_failover(rig: Rig) -> Figures:
    """Seconds from SIGKILL of the master to the next one, the next accepted task and its run."""
    with start_group("valkey", rig.directory / "group") as group:
        ledger = Ledger(rig.directory / "ledger")
        options = {**group.options, **WAITING}
        settings = Settings(f"delayed+{group.url}", None, options, str(ledger.path))
        with _Sender(settings, rig.directory) as sender:
            ledger.wait_for(20)
            old, killed_at = group.master, time.time()
            old.kill()
            group.wait_for_failover(old, 60)
            named_at = time.time()
            sent = wait_until(lambda: sender.first_after(killed_at), "a task is accepted", 60)
            ledger.wait_for_all([sent.id], 60)
            (run, *_) = ledger.of(sent.id)
    return {
        "named": named_at - killed_at,
        "accepted": sent.accepted_at - killed_at,
        "run": run["at"] - killed_at,
    }


class Sent(NamedTuple):
    sent_at: float
    accepted_at: float
    id: str


class _Sender:
    """A prefork worker, and a thread that sends it tasks all the time."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._worker = Worker(settings, directory, pool="prefork", concurrency=2)
        self._app = make_app(settings)
        self._sent: list[Sent] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            sent_at = time.time()
            try:
                result = self._app.send_task("record", retry=False)
            except (OperationalError, OSError):
                continue
            self._sent.append(Sent(sent_at, time.time(), result.id))

    def first_after(self, moment: float) -> Sent | None:
        """The first task that was accepted of those sent after a moment."""
        return next((each for each in self._sent if each.sent_at > moment), None)

    def __enter__(self) -> _Sender:
        self._worker.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._worker.kill()
        self._app.close()


def failover_rows(ours: Figures) -> list[Row]:
    after = f"{ours['named']:.1f} s"
    return [
        Row(
            f"SIGKILL of the master until the Sentinels name the next one "
            f"(`down-after-milliseconds {DOWN_AFTER_MS}`)",
            NOTHING,
            NOTHING,
            after,
        ),
        Row(
            "until the next task is accepted; until it runs",
            NOTHING,
            NOTHING,
            f"{ours['accepted']:.1f} s; {ours['run']:.1f} s",
        ),
    ]


BENCHMARKS = [
    Benchmark("replicas", measure_replicas, replica_rows, sides=("ours",)),
    Benchmark("failover", measure_failover, failover_rows, sides=("ours",)),
]
