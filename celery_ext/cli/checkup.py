"""The first checks of `doctor`: versions, server, clock, workers and policies."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from shlex import quote
from time import perf_counter
from typing import Any

from redis import Redis
from rich.table import Table
from rich.text import Text

from celery_ext.app.settings import misplaced
from celery_ext.control.counts import ConsumerInfo
from celery_ext.control.delayed import Delayed
from celery_ext.control.policies.pauses import QueuePause
from celery_ext.tasks.formatting import number, plain, queues_word, tasks_word
from celery_ext.tasks.short_repr import printable
from kombu_delayed.connection.format import MAJOR
from kombu_delayed.connection.stock import stock_consumers
from kombu_delayed.consumer.policy.decisions import ALL_QUEUES
from kombu_delayed.errors import ServerNotReady
from kombu_delayed.inspection.doctor import Finding
from kombu_delayed.message import zstd
from kombu_delayed.message.durations import length_text
from kombu_delayed.store.calls.shards import label
from kombu_delayed.store.keys import format_version
from kombu_delayed.store.queue_metrics import Metrics, fold
from kombu_delayed.transport.server_checks import check_that_it_writes, inspect, numbers_of

#: The oldest versions that work.
OLDEST = {"celery": (5, 5), "kombu": (5, 5), "redis": (6, 0)}
#: The newest versions that our tests ran with: newer ones may have other internals.
NEWEST = {"celery": (5, 7), "kombu": (5, 7), "redis": (8,)}
NAMES = {"celery": "Celery", "kombu": "Kombu", "redis": "redis-py"}

#: A round trip to the server that takes longer is reported.
SLOW_SECONDS = 0.05

#: A server with more of its memory in use than this is nearly full.
FULL = 0.8

#: A task that has been due for longer than this is late.
LATE_SECONDS = 60

PINGS = 5

#: How many names of queues are shown.
SHOWN = 3


@dataclass(frozen=True)
class Check:
    """One thing that was checked: its state, and what to do about it, if anything."""

    name: str
    text: str
    remedy: str = ""

    @property
    def is_right(self) -> bool:
        """Returns whether nothing has to be done."""
        return not self.remedy


def check_up(delayed: Delayed, queue: str | None, findings: list[Finding]) -> Iterator[Check]:
    """Check everything but the messages; `findings` are the problems that were found before."""
    yield _versions()
    servers = [Redis(connection_pool=each.pool) for each in delayed.store.run.everywhere()]
    wrong = {each.kind: each for each in findings}
    if "nodes" in wrong:
        yield _nodes(wrong["nodes"])
    yield _server(servers, delayed)
    yield _settings(servers, wrong.get("server"))
    if (format := delayed.store.format) is not None and format.major:
        text = "\n".join(wrong["format"].examples) if "format" in wrong else ""
        yield Check("format of the data", f"{format.major}, the newest is {MAJOR}", text)
    yield _compression(delayed, queue)
    yield _app(delayed)
    yield from _queues(delayed, queue)


def _versions() -> Check:
    found = {name: metadata.version(name) for name in OLDEST}
    old = [name for name, version in found.items() if numbers_of(version) < OLDEST[name]]
    text = ", ".join(f"{NAMES[name]} {version}" for name, version in found.items())
    new = [name for name in found if numbers_of(found[name])[: len(NEWEST[name])] > NEWEST[name]]
    remedy = "; ".join(
        [
            *(f"install {NAMES[name]} {_dotted(OLDEST[name])} or newer" for name in old),
            *(
                f"{NAMES[name]} is newer than {_dotted(NEWEST[name])}, the last one tested: "
                "run your own tests with it first"
                for name in new
            ),
        ]
    )
    own = metadata.version("kombu-delayed")
    return Check("versions", f"{own}; {text}, Python {platform.python_version()}", remedy)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _server(servers: list[Redis], delayed: Delayed) -> Check:
    info: Any = servers[0].info("server")
    kind = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version", "")
    seconds = max(map(_round_trip, servers))
    text = f"{kind} {version} at {delayed.connection.as_uri()}, answers in {_short(seconds)}"
    if len(servers) > 1:
        text += f", the slowest of {len(servers)} masters"
    remedy = ""
    if seconds > SLOW_SECONDS:
        remedy = "run workers and producers closer to the server: each claim is a round trip"
    try:
        for server in servers:
            check_that_it_writes(server, format_version(delayed.store.keys("").prefix))
    except ServerNotReady as error:
        remedy = f"{error}. No task is sent, starts or is acknowledged until it takes them again"
    return Check("server", text, remedy)


def _nodes(down: Finding) -> Check:
    text = f"{number(down.count)} of the Cluster's masters {'does' if down.count == 1 else 'do'} "
    remedy = "start what is down, or let a replica take over: the queues there are not examined"
    return Check("nodes", f"{text}not answer: {', '.join(down.examples)}", remedy)


def _round_trip(server: Redis) -> float:
    def once() -> float:
        began = perf_counter()
        server.ping()
        return perf_counter() - began

    return min(once() for _ in range(PINGS))


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _settings(servers: list[Redis], finding: Finding | None) -> Check:
    found = [inspect(each) for each in servers]
    apart = max((each.ahead_seconds for each in found), key=abs)
    kept = "kept on disk" if all(each.persistent for each in found) else "kept in memory only"
    used = max(map(_memory_used, servers))
    text = f"{kept}, {found[0].eviction}, clocks {_short(abs(apart))} apart"
    remedies = list(finding.examples) if finding else []
    if used:
        text += f", {used:.0%} of its memory in use"
    if used > FULL:
        remedies.append(
            "the server is nearly full, and then refuses new messages: give it more memory, or "
            "spread the queues over a Cluster"
        )
    return Check("settings and clock", text, "\n".join(remedies))


def _memory_used(server: Redis) -> float:
    memory: Any = server.info("memory")
    most = int(memory.get("maxmemory") or 0)
    return int(memory["used_memory"]) / most if most else 0.0


def _compression(delayed: Delayed, queue: str | None) -> Check:
    store = delayed.store
    shards = delayed.shards(queue)
    fields = [("HMGET", store.keys(each).dictionaries, "current", "count") for each in shards]
    found = dict(zip(shards, store.run.many(fields), strict=True))
    compressed = [
        f"{label(each)} has dictionary {current.decode()}"
        + (f", the newest of {count.decode()}" if count != b"1" else "")
        for each, (current, count) in found.items()
        if current
    ]
    if not compressed and not store.compression:
        return Check("compression", "off")
    text = "on in this app" if store.compression else "off in this app"
    text += f"; {_some(compressed, shown=str)}" if compressed else "; no queue is compressed yet"
    text += "; the extra zstd is " + ("installed" if zstd.is_installed() else "not installed here")
    remedies = []
    if not zstd.is_installed():
        remedies.append(
            "wherever these queues are read, run: pip install 'kombu-delayed[zstd]'; a worker "
            "without it does not start"
        )
    stock = [] if store.cluster else stock_consumers(store.client)
    if stock is None:
        remedies.append(
            "the user of the broker URL may not list clients, so a stock worker, which loses "
            "compressed messages, is not noticed: give the user the right +client|list"
        )
    elif stock:
        remedies.append(
            f"{number(len(stock))} {'client waits' if len(stock) == 1 else 'clients wait'} with "
            f"BRPOP ({stock[0]}): a stock worker loses compressed messages, so stop it, or give it "
            "another database"
        )
    return Check("compression", text, "\n".join(remedies))


def _app(delayed: Delayed) -> Check:
    is_installed = getattr(delayed.app, "delayed", None) is not None
    text = "celery_ext is installed" if is_installed else "the transport alone"
    hint = "call celery_ext.install(app) to see task outcomes, and for policies"
    remedies = ["" if is_installed else hint, misplaced(delayed.app.conf)]
    return Check("app", text, "\n".join(filter(None, remedies)))


def _queues(delayed: Delayed, queue: str | None) -> Iterator[Check]:
    by_shard = delayed.metrics_by_shard(queue)
    metrics = {name: fold(shards) for name, shards in by_shard.items()}
    consumers = [each for each in delayed.consumers(queue) if each.lease_seconds > 0]
    alone = [
        name
        for name, each in sorted(metrics.items())
        if not each.consumers
        and each.ready + each.delayed
        and not delayed.store.run("EXISTS", delayed.store.keys(name).expires)  # such as replies
    ]
    yield _workers(metrics, consumers, alone)
    yield from _shards(by_shard)
    yield _on_time(metrics, alone)
    yield from _policies(delayed, metrics, consumers, is_of_all=queue is None)
    if parts := [each for each in delayed.pauses(queue) if each.task or each.tenant]:
        yield Check("pauses", _some([*map(_paused_part, parts)], shown=str))


def _workers(metrics: dict[str, Metrics], consumers: list[ConsumerInfo], alone: list[str]) -> Check:
    names = {each.name.rsplit(":", 2)[0] for each in consumers}
    count = sum(each.delayed + each.ready for each in metrics.values())
    text = f"{number(len(names))} for {queues_word(len(metrics))} with {tasks_word(count)}"
    start = f"start a worker with -Q {quote(printable(','.join(alone[:SHOWN])))}"
    remedy = f"no worker consumes {_some(alone)}: {start}" if alone else ""
    return Check("workers", text, remedy)


def _shards(by_shard: dict[str, list[Metrics]]) -> Iterator[Check]:
    """Shards with messages but without a consumer, if others of their queue have one."""
    for name, shards in by_shard.items():
        idle = {n: m for n, m in enumerate(shards) if not m.consumers and m.ready + m.delayed}
        if idle and any(each.consumers for each in shards):
            numbers = ", ".join(map(str, idle))
            count = sum(each.ready + each.delayed for each in idle.values())
            yield Check(
                "shards",
                f"{tasks_word(count)} of {name} in shards without a worker ({numbers})",
                "if it stays so, read the log of its workers: a queue with limits of its own must "
                "have one shard, see the guide Shards",
            )


def _on_time(metrics: dict[str, Metrics], alone: list[str]) -> Check:
    """The latest queue with a worker, or else the latest one without."""
    late = {
        name: each.oldest_due_seconds
        for name, each in metrics.items()
        if not each.paused and each.oldest_due_seconds > LATE_SECONDS
    }
    if not late:
        return Check("on time", "no due task has waited for long")
    name = max(late, key=lambda name: (name not in alone, late[name]))
    text = f"the oldest task that is due has waited for {length_text(late[name])}, in {name}"
    if name in alone:
        return Check("on time", text, "start a worker for this queue")
    return Check("on time", text, "start more workers, or see Troubleshooting, Tasks run late")


def _policies(
    delayed: Delayed, metrics: dict[str, Metrics], consumers: list[ConsumerInfo], is_of_all: bool
) -> Iterator[Check]:
    consumed = {each.queue for each in consumers}
    strange = delayed.policies.strange([*metrics])
    for name, why in strange.items():
        yield Check(
            "policies",
            f"this app cannot apply the policies of {name}: {why}",
            "workers of this app take nothing from that queue: start them with the code that "
            "declares its policies, or without the queue",
        )
    declared = delayed.policies.of([name for name in metrics if name not in strange])
    if unlike := [each.queue for each in declared if each.differs and each.queue in consumed]:
        yield Check(
            "policies",
            f"workers of {_some(unlike)} apply other policies than this app declares",
            "see `celery delayed policies`; start a worker of this app, or run "
            "`celery delayed apply-policies`",
        )
    elif is_of_all and (unused := sorted(_declared(delayed) - {ALL_QUEUES, *metrics})):
        yield Check(
            "policies",
            f"delayed_policies names {_some(unused)}, which no program has used yet",
            "correct the name, or send a first task there",
        )
    elif declared or delayed.rules is not None:
        yield Check(
            "policies", f"{queues_word(len(declared))} with policies that this app can apply"
        )


def _paused_part(pause: QueuePause) -> str:
    part = f"task {pause.task}" if pause.task else ""
    part += f"{' of ' * bool(part)}tenant {pause.tenant}" if pause.tenant else ""
    return f"{part} in {pause.queue} is paused by {pause.by}"


def _declared(delayed: Delayed) -> set[str]:
    options = delayed.app.conf.broker_transport_options or {}
    return {*(options.get("delayed_policies") or {})}


def _some(names: list[str], shown: Callable[[str], str] = repr) -> str:
    text = ", ".join(map(shown, names[:SHOWN]))
    return text + (f" and {number(len(names) - SHOWN)} more" if len(names) > SHOWN else "")


def checks_table(checks: list[Check]) -> Table:
    """A line for each check, and below it what to do."""
    made = Table.grid(padding=(0, 2, 0, 0))
    for each in checks:
        mark = Text("✓", "green") if each.is_right else Text("!", "yellow")
        text = plain(each.text)
        if each.remedy:
            text.append(f"\n→ {each.remedy}", "yellow")
        made.add_row(mark, Text(each.name, "bold"), text)
    return made
