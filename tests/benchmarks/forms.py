"""The size of a task in Redis as sent, packed and compressed, and the cost of each form."""

from __future__ import annotations

import random
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis

from celery_ext import Delayed
from kombu_delayed.message.envelope import open_envelope
from kombu_delayed.store.store import Store
from tests.benchmarks.app import QUEUE, create_app
from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import Rig, cpu_seconds
from tests.kit.servers import available_kinds, start_server

#: Compressed and packed tasks are in buckets; plain ones are in one hash, as they were sent.
FORMS = "plain", "packed", "zstd"
#: How much more each form may cost than a plain one.
MORE = {"packed": 0.05, "zstd": 0.15}
VERBS = {
    "apply_async": "processor time of client and server for `apply_async`",
    "schedule_many": "`schedule_many`, for a task",
    "deliver": "deliver, open and ack, 16 tasks a claim, for a task",
    "find": "`find`, for a task",
}
LIMIT_BYTES = {"packed": 1_300, "zstd": 550}
TURNS = 5

FIRST = "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Klara Leon Mia Noah Olga Paul"
LAST = "Becker Fischer Hoffmann Keller Lang Maier Neumann Peters Richter Schulz Vogel"
GOODS = "shirt shoes jacket trousers socks belt scarf gloves hat coat"


def argument(dice: random.Random) -> dict[str, Any]:
    """About 300 bytes as JSON, in which names, amounts and a random token change."""
    first, last = dice.choice(FIRST.split()), dice.choice(LAST.split())
    goods = [
        {
            "sku": f"{dice.choice(GOODS.split())}-{dice.randrange(10_000):04}",
            "quantity": dice.randrange(1, 5),
            "price": f"{dice.randrange(100, 20_000) / 100:.2f}",
        }
        for _ in range(2)
    ]
    email = f"{first}.{last}{dice.randrange(1_000)}@example.com".lower()
    return {
        "order_id": dice.randrange(10**9),
        "customer": {"name": f"{first} {last}", "email": email, "locale": "de_DE"},
        "items": goods,
        "token": uuid.UUID(int=dice.getrandbits(128)).hex,
        "template": "reminder",
    }


@contextmanager
def delayed_of(url: str, form: str) -> Iterator[Delayed]:
    """An app whose messages get a form once its queue is large."""
    with create_app(url) as app:
        if form == "zstd":
            app.conf.broker_transport_options = {"delayed_compression": "zstd"}
        delayed = Delayed(app)
        _shape(delayed.store, form)
        yield delayed
        delayed.close()


def _shape(store: Store, form: str) -> None:
    if form == "plain":
        store.bucket_bytes = 0


def schedule(delayed: Delayed, count: int, dice: random.Random) -> None:
    work = delayed.app.tasks["work"]
    rows = (
        (work, (argument(dice),), {}, None, {"countdown": dice.randrange(3_600, 30 * 86_400)})
        for _ in range(count)
    )
    report = delayed.schedule_many(rows, batch=250, progress=None)
    if report.delayed != count:
        raise RuntimeError(f"{report.delayed} of {count} tasks are delayed")


def memory(rig: Rig, form: str) -> float:
    """Bytes for each task, with index and events, on a fresh server."""
    count, directory = rig.scaled(20_000, 5_000), rig.directory / f"memory-{form}"
    with (
        start_server(available_kinds()[0], directory, port=0) as server,
        server.client() as client,
        delayed_of(f"delayed+{server.url}", form) as delayed,
    ):
        before = used(client)
        schedule(delayed, count, random.Random(1))
        return (used(client) - before) / count


def used(client: redis.Redis) -> float:
    return float(client.info("memory")["used_memory"])


def costs(rig: Rig, form: str, seed: int) -> Figures:
    """Processor time of client and server in µs for each task, in a backlog of some thousands."""
    rig.redis.flushall()
    dice, count, calls = random.Random(seed), rig.scaled(4_000, 1_000), rig.scaled(500, 100)
    with delayed_of(rig.url(), form) as delayed:
        schedule(delayed, 2_000, dice)  # the queue becomes large, and has a dictionary
        found = {"schedule_many": timed(rig, count, lambda: schedule(delayed, count, dice))}
        found["find"] = timed(rig, 2_000 + count, lambda: len([*delayed.find(task="work")]))
        with delayed.app.producer_or_acquire() as producer:
            _shape(producer.channel.store, form)
            work, rest = delayed.app.tasks["work"], [(argument(dice),) for _ in range(calls + 20)]
            for arguments in rest[:20]:
                work.apply_async(arguments, countdown=3_600, producer=producer)

            def send() -> None:
                for arguments in rest[20:]:
                    work.apply_async(arguments, countdown=3_600, producer=producer)

            found["apply_async"] = timed(rig, calls, send)
        found["deliver"] = timed(rig, count, lambda: consume(delayed.store, count))
    return found


def timed(rig: Rig, count: int, call: Callable[[], Any]) -> float:
    """Processor time, as the machine may have other work."""
    began = cpu_seconds(rig.redis) + time.process_time()
    call()
    return (cpu_seconds(rig.redis) + time.process_time() - began) / count * 1e6


def consume(store: Store, count: int) -> None:
    """Handles due messages as a consumer does, up to their payloads."""
    store.now, tag = f"+{40 * 86_400_000}", 1
    while tag <= count:
        got = store.deliver(QUEUE, "benchmark-60000", 16, tag, lease_ms=60_000, promotions=16)
        if got is None or not got.records:
            raise RuntimeError("the backlog is too small")
        tags = range(tag, tag + len(got.records))
        for record in got.records:
            open_envelope(store.readable(QUEUE, record)[1:], tag)
        store.ack(QUEUE, "benchmark-60000", tags, lambda: None)
        tag += len(got.records)
    store.run.settle()


def _bytes(form: str) -> Line:
    limit = LIMIT_BYTES.get(form)
    return Line(
        f"a delayed task with 300 B of arguments, {form}: memory of the server, with index and "
        "events",
        f"{{{form} bytes:,.0f}} B",
        f"≤ {limit} B" if limit else "-",
        reached=(lambda f: f[f"{form} bytes"] <= limit) if limit else None,
    )


def cost(what: str, verb: str, form: str) -> Line:
    """How much more a form may cost than a plain message."""
    name, plain = f"{form} {verb}", f"plain {verb}"
    return Line(
        f"{what}: {form}, and plain",
        f"{{{name}:.1f}} µs, {{{plain}:.1f}} µs",
        f"≤ {1 + MORE[form]:.2f}",
        (name, plain),
        lambda f: f[name] <= f[plain] * (1 + MORE[form]),
    )


def in_turns(turns: int) -> Iterator[Sequence[str]]:
    """The forms, each one first in its turn."""
    for turn in range(turns):
        at = turn % len(FORMS)
        yield FORMS[at:] + FORMS[:at]


@benchmark(
    "forms",
    *map(_bytes, FORMS),
    *(cost(VERBS[verb], verb, form) for verb in VERBS for form in MORE),
)
def forms(rig: Rig) -> Figures:
    """Medians of turns, so that other load on the machine hits all forms."""
    found = {f"{form} bytes": memory(rig, form) for form in FORMS}
    spent: dict[str, list[float]] = {}
    for turn, order in enumerate(in_turns(rig.scaled(TURNS, 1))):
        for form in order:
            for verb, us in costs(rig, form, turn).items():
                spent.setdefault(f"{form} {verb}", []).append(us)
    return found | {name: statistics.median(each) for name, each in spent.items()}
