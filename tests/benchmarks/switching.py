"""What a planned failover of Sentinel loses, repeats and holds up."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any, NamedTuple

from kombu.exceptions import OperationalError

from kombu_delayed.errors import DelayedError
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig
from tests.kit.ledger import Ledger
from tests.kit.sentinels import MASTER, Group, _role, start_group
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

#: Sentinel's own, as in production; the tests hurry it.
INTERVALS = ("info-period", "10000", "publish-period", "2000", "ping-period", "1000")
INTERVALS += ("ask-period", "1000")

#: Three threads send each 0.1 s, for now and with these countdowns.
THREADS, PAUSE_SECONDS, COUNTDOWNS = 3, 0.1, (None, 0.5, 3, 8)

SETTLE_SECONDS = 20


class Sent(NamedTuple):
    at: float
    id: str


class Sender:
    """Threads that send; what raised an error does not count as sent."""

    def __init__(self, app: Any) -> None:
        self.sent: list[Sent] = []
        self.errors = 0
        self._app = app
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(THREADS)]

    def _run(self) -> None:
        n = 0
        while not self._stop.wait(PAUSE_SECONDS):
            n += 1
            try:
                countdown = COUNTDOWNS[n % len(COUNTDOWNS)]
                result = self._app.send_task("record", countdown=countdown, retry=False)
            except (OperationalError, OSError, DelayedError):
                self.errors += 1
            else:
                self.sent.append(Sent(time.time(), result.id))

    def __enter__(self) -> Sender:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def measure(rig: Rig, replicas: int = 0) -> Figures:
    """A promotion in the middle of some 700 messages, two workers of two processes each."""
    with start_group("valkey", rig.directory / "group") as group:
        for sentinel in group.sentinels:
            with sentinel.client() as client:
                client.execute_command("SENTINEL", "DEBUG", *INTERVALS)
        ledger = Ledger(rig.directory / "ledger")
        options = {**group.options}
        url = f"delayed+{group.url}"
        if rig.side == "stock":
            url = url.replace("delayed+", "")
        elif replicas:
            options["delayed_replicas_to_wait"] = replicas
        settings = Settings(url, None, options, str(ledger.path))
        return _under_load(rig, group, settings, ledger)


def _under_load(rig: Rig, group: Group, settings: Settings, ledger: Ledger) -> Figures:
    names = ("first", "second")
    workers = [
        Worker(settings, rig.directory, name=name, pool="prefork", concurrency=2) for name in names
    ]
    app = make_app(settings)
    try:
        for worker in workers:
            worker.start()
        with Sender(app) as sender:
            time.sleep(10)
            switched_at = _switch(group)
            time.sleep(5)
        _wait_for_all(sender, ledger)
        return _figures(sender, ledger, switched_at)
    finally:
        for worker in workers:
            worker.kill()
        app.close()


def _switch(group: Group) -> float:
    """Promote a replica and wait until the old master is one; returns when the new was named."""
    old = group.master
    with group.sentinels[0].client() as client:
        client.execute_command("SENTINEL", "FAILOVER", MASTER)
    group.wait_for_failover(old)
    switched_at = time.time()
    wait_until(lambda: _role(group.client(old)) == "slave", "the old master is a replica", 60, 0.05)
    return switched_at


def _wait_for_all(sender: Sender, ledger: Ledger) -> None:
    wanted, end = {each.id for each in sender.sent}, time.time() + SETTLE_SECONDS
    wait_until(
        lambda: wanted <= set(ledger.ids()) or time.time() > end, "the end", SETTLE_SECONDS + 5, 0.2
    )


def _figures(sender: Sender, ledger: Ledger, switched_at: float) -> Figures:
    runs = ledger.runs()
    ran_at = sorted(entry["at"] for entry in ledger.entries())
    sent_at = sorted(each.at for each in sender.sent)
    return {
        "sent": len(sender.sent),
        "errors": sender.errors,
        "lost": sum(not runs[each.id] for each in sender.sent),
        "twice": sum(runs[each.id] > 1 for each in sender.sent),
        "next": next(at for at in ran_at if at > switched_at) - switched_at,
        "pause": max(b - a for a, b in pairwise(sent_at)),
    }


def measure_waiting(rig: Rig) -> Figures:
    return measure(rig, replicas=1)


def _told(found: Figures) -> str:
    return (
        f"{found['lost']:.0f} lost, {found['twice']:.0f} twice of {found['sent']:,.0f}; "
        f"{found['errors']:.0f} errors; next after {found['next']:.1f} s, "
        f"sending paused {found['pause']:.1f} s"
    )


def rows(stock: Figures, ours: Figures) -> list[Row]:
    what = "`SENTINEL FAILOVER` under 30 messages/s, without waiting for replicas"
    return [Row(what, "0 lost", _told(stock), _told(ours), reached=not ours["lost"])]


def waiting_rows(ours: Figures) -> list[Row]:
    what = "the same with `delayed_replicas_to_wait: 1`"
    return [Row(what, "0 lost, 0 twice", NOTHING, _told(ours), reached=not ours["lost"])]


BENCHMARKS = [
    Benchmark("switch", measure, rows),
    Benchmark("switch-replicas", measure_waiting, waiting_rows, sides=("ours",)),
]
