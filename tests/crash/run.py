"""One run: a server, a proxy, workers, load and faults; then the verdict."""

from __future__ import annotations

import contextlib
import random
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import redis

from tests.crash import app as crash_app
from tests.crash import limits
from tests.crash.asking import Answerer
from tests.crash.cluster_faults import CLUSTER_SHARES, QUEUE, SHARDS, ClusterFaults, Routed
from tests.crash.crew import Crew
from tests.crash.evidence import Evidence, stalls
from tests.crash.failovers import DOWN_AFTER_MS, SENTINEL_SHARES, Failovers, Master
from tests.crash.faults import SHARES, Faults, schedule
from tests.crash.history import Execution, Key, collect
from tests.crash.journal import Line, Reader
from tests.crash.load import Senders
from tests.crash.verdict import Verdict, judge
from tests.crash.writing import SENDER
from tests.kit.clusters import start_cluster
from tests.kit.proxy import Proxy
from tests.kit.sentinels import start_group
from tests.kit.servers import Server, start_server
from tests.kit.tasks_app import Settings

LEASE_SECONDS = 2.5
SETTLE_SECONDS = 10
READY_SECONDS = 60

_LINE = r"^\[([\d-]+ [\d:]+,\d+): "
_RECLAIM = re.compile(_LINE + r".*Consumer \S+:(\d+):\w+ has stopped answering", re.MULTILINE)
_UNRENEWED = re.compile(
    _LINE + r".*(?:Cannot renew the lease|Lost the broker, trying again)", re.MULTILINE
)
_SAFETY = {
    "single": "appendfsync always",
    "sentinel": "two replicas, delayed_replicas_to_wait 1",
    "cluster": "three masters with a replica each, delayed_replicas_to_wait 1",
}
_REPLICATED = {"delayed_replicas_to_wait": 1, "delayed_replica_timeout_seconds": 4}
_PLANS = {
    "single": (SHARES, Faults),
    "sentinel": (SENTINEL_SHARES, Failovers),
    "cluster": (CLUSTER_SHARES, ClusterFaults),
}
_ID = re.compile(rb'"id": ?"([0-9a-f-]{36})"')
_RETRIES = re.compile(rb'"retries": ?(\d+)')


@dataclass(frozen=True)
class Order:
    """What to run. `every_seconds` is the mean time between two faults."""

    seconds: float
    seed: int
    transport: str = "delayed"
    rate: float = 40
    every_seconds: float = 5
    keep: Path | None = None
    server: str = "single"

    @property
    def has_policies(self) -> bool:
        """Whether its load has limits and expects answers."""
        return self.transport == "delayed"

    def settings(self, port: int | None, journals: Path) -> Settings:
        prefix, options = "", {}
        if self.transport == "delayed":
            prefix, options = "delayed+", {"delayed_lease_seconds": LEASE_SECONDS}
        url = f"{prefix}redis://127.0.0.1:{port}/0"
        return Settings(url, None, options, str(journals))


@dataclass
class Result:
    order: Order
    verdict: Verdict
    executions: dict[Key, Execution]
    sent: int
    refused: int
    faults: Counter[str]
    crew: Crew
    server: str


Report = Callable[[str, float, str], None]


def run(order: Order, report: Report = lambda stage, share, text: None) -> Result:
    """`report` is told the stage, its share done and figures, a few times a second."""
    with contextlib.ExitStack() as stack:
        directory = order.keep
        if directory is None:
            made = tempfile.TemporaryDirectory(prefix="kombu-delayed-crash-")
            directory = Path(stack.enter_context(made))
        journals = directory / "journals"
        journals.mkdir(parents=True)
        server: Any
        proxy: Proxy | None = None
        if order.server == "sentinel":
            group = stack.enter_context(start_group("valkey", directory / "group", DOWN_AFTER_MS))
            server, settings = Master(group), _settings_of(group.url, journals, **group.options)
        elif order.server == "cluster":
            cluster = stack.enter_context(start_cluster("valkey", directory / "cluster"))
            shards = {"delayed_shards": {QUEUE: SHARDS}}
            server, settings = Routed(cluster), _settings_of(cluster.url, journals, **shards)
        else:
            server = stack.enter_context(_server(directory / "server"))
            proxy = stack.enter_context(Proxy(server.port or 0))
            settings = order.settings(proxy.port, journals)
        crew = Crew(settings, directory, (QUEUE, *(limits.QUEUES if order.has_policies else ())))
        stack.callback(crew.close)
        app = crash_app.make_app(settings)
        answerer = Answerer(app) if order.has_policies else None
        senders = Senders(app, order.seed, order.rate, answerer)
        with crash_app.writing(journals, SENDER):
            return _Run(order, server, proxy, crew, senders, Reader(journals), report).run()


def _settings_of(url: str, journals: Path, **options: Any) -> Settings:
    options |= {"delayed_lease_seconds": LEASE_SECONDS, **_REPLICATED}
    return Settings(f"delayed+{url}", None, options, str(journals))


def _server(directory: Path) -> Server:
    config = {"appendfsync": "always", "enable-debug-command": "yes"}
    return start_server("valkey", directory, port=0, append_only=True, config=config)


class _Run:
    def __init__(
        self,
        order: Order,
        server: Any,
        proxy: Proxy | None,
        crew: Crew,
        senders: Senders,
        reader: Reader,
        report: Report,
    ) -> None:
        self.order = order
        self.server = server
        self.crew = crew
        self.senders = senders
        self.report = report
        shares, kind = _PLANS[order.server]
        plan = schedule(order.seed, order.seconds, order.every_seconds, shares)
        self._make_faults = lambda: kind(
            crew, server, proxy, LEASE_SECONDS, random.Random(order.seed), plan
        )
        self._reader = reader
        self.lines: list[Line] = []
        self._missing: set[Key] = set()
        self._started: set[Key] = set()
        self._last_due = 0.0
        self._last_start = 0.0

    def run(self) -> Result:
        self.crew.start()
        self._until("workers start", READY_SECONDS, self._all_ready)
        faults = self._make_faults()
        self.senders.start()
        self._until("faults", self.order.seconds, lambda: False, faults.step)
        faults.finish()
        self._until("last sends", 0.5, lambda: False, self.crew.look_after)
        self.senders.stop()
        self._settle()
        held = self._held()
        self.crew.finish()
        self.lines.extend(self._reader.new_lines())
        executions = collect(self.lines, list(self.senders.plans.values()))
        lives = {life.name: life for life in self.crew.lives}
        evidence = Evidence(
            lives,
            [*faults.windows, *stalls(self.lines)],
            self._reclaims(),
            self._unrenewed(),
            LEASE_SECONDS,
            self._left(),
            held,
        )
        with self.server.client() as client:
            info = client.info("server")
        return Result(
            self.order,
            judge(executions, evidence),
            executions,
            self.senders.sent,
            self.senders.refused,
            faults.counts,
            self.crew,
            f"Valkey {info['valkey_version']}, appendonly yes, {_SAFETY[self.order.server]}",
        )

    def _until(
        self,
        stage: str,
        seconds: float,
        done: Callable[[], bool],
        step: Callable[[], Any] = lambda: None,
    ) -> None:
        began = time.monotonic()
        read_at = 0.0
        while not done() and (passed := time.monotonic() - began) < seconds:
            step()
            if time.monotonic() - read_at > 0.5:
                self._read()
                read_at = time.monotonic()
                self.report(stage, passed / seconds, self._figures())
            time.sleep(0.02)

    def _figures(self) -> str:
        return f"{self.senders.sent} sent, {len(self._started)} run"

    def _read(self) -> None:
        for line in self._reader.new_lines():
            self.lines.append(line)
            key = line["id"], line["retries"]
            if line["event"] == "ready":
                for life in self.crew.current.values():
                    life.ready |= life.name == line["owner"]
            elif line["event"] == "start":
                self._started.add(key)
                self._last_start = max(self._last_start, line["at"])
                self._missing.discard(key)
            elif line["event"] in ("taken", "published"):
                if (key not in self._started and line["owner"] != SENDER) or (
                    key not in self._started and line["event"] == "taken"
                ):
                    self._missing.add(key)
                if line.get("eta"):
                    self._last_due = max(self._last_due, _seconds(line["eta"]))

    def _all_ready(self) -> bool:
        return all(life.ready for life in self.crew.current.values())

    def _settle(self) -> None:
        """Until all is run and gone, or nothing has run for so long that it never will be."""
        ended = time.time()

        def over() -> bool:
            last = max(self._last_due, self._last_start, self.crew.changed_at, ended)
            quiet = time.time() > last + LEASE_SECONDS + SETTLE_SECONDS
            late = quiet and not self.crew.is_ending
            busy = self.senders.busy or self._missing
            return late or not (busy or self._left() or self._held())

        self._until("settling", 120, over, self.crew.look_after)

    def _left(self) -> dict[Key, list[str]]:
        """Task messages that are on the server, and in what."""
        found: dict[Key, list[str]] = defaultdict(list)
        with self.server.client() as client:
            for key in client.scan_iter("*"):
                if key.endswith(b":expectations"):
                    continue  # what is known of those that have ended
                for value in _values(client, key):
                    id, retries = _ID.search(value), _RETRIES.search(value)
                    if id:
                        what = id[1].decode(), int(retries[1]) if retries else 0
                        found[what].append(key.decode())
        return found

    def _held(self) -> dict[str, int]:
        """What gates hold: slots, and messages that wait."""
        found: dict[str, int] = {}
        with self.server.client() as client:
            for key in client.scan_iter("*:gate:slots*"):
                found |= {f"{key.decode()} {name.decode()}": 1 for name in client.hkeys(key)}
            for key in client.scan_iter("*:delayed:waiting"):
                found[key.decode()] = client.zcard(key)
        return found

    def _reclaims(self) -> list[tuple[float, int]]:
        found = [
            (_logged(at), int(pid))
            for life in self.crew.lives
            for at, pid in _RECLAIM.findall(life.log)
        ]
        return sorted(found)

    def _unrenewed(self) -> list[tuple[float, int]]:
        found = [
            (_logged(at), life.pid)
            for life in self.crew.lives
            for at in _UNRENEWED.findall(life.log)
        ]
        return sorted(found)


def _logged(at: str) -> float:
    return datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def _seconds(eta: str) -> float:
    return datetime.fromisoformat(eta).timestamp()


def _values(client: redis.Redis, key: bytes) -> list[bytes]:
    kind = client.type(key)
    if kind == b"list":
        return client.lrange(key, 0, -1)
    if kind == b"hash":
        return client.hvals(key)
    return []
