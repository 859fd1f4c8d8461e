"""The Celery app of the benchmarks: one task, which notes when it starts."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery
from celery.signals import worker_ready

LINE = struct.Struct("<qdd")
BROKER, LEDGER = "BENCHMARK_BROKER", "BENCHMARK_LEDGER"
#: Transport options, as JSON.
OPTIONS = "BENCHMARK_OPTIONS"
#: "fair", "keys" or "global": the queue has such policies.
GATE = "BENCHMARK_GATE"
#: Set if the app is extended: "yes", or "silent" if outcomes are not recorded.
EXTENDED = "BENCHMARK_EXTENDED"
QUEUE = "celery"


class Start(NamedTuple):
    """One execution: the task's number, its due time and its start, in seconds."""

    number: int
    due: float
    at: float


def _policies() -> dict[str, Any]:
    name = os.environ.get(GATE, "none")
    if name == "none":
        return {}
    from celery_ext.policies import Fair, Limit

    policies = {
        "fair": Fair(by="tenant"),
        "keys": Limit(concurrency=4, by="tenant"),
        "global": Limit(concurrency=50, name="all", scope="global"),
    }
    return {"delayed_policies": {QUEUE: [policies[name]]}}


def create_app(broker_url: str) -> Celery:
    app = Celery("benchmarks", broker=broker_url, set_as_current=False)
    app.conf.update(
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
        broker_transport_options={**json.loads(os.environ.get(OPTIONS, "{}")), **_policies()},
    )
    ledger = -1

    @app.task(name="work", shared=False)
    def work(number: int = 0, due: float = 0.0, seconds: float = 0.0) -> None:
        nonlocal ledger
        if ledger < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            ledger = os.open(os.environ[LEDGER], flags, 0o600)
        os.write(ledger, LINE.pack(number, due, time.time()))
        if seconds:
            time.sleep(seconds)

    app.task(name="work_late", shared=False, acks_late=True)(work.run)
    return app


@contextmanager
def batch(app: Celery) -> Iterator[dict[str, Any]]:
    """Options for `apply_async` that publish in batches, if Kombu has them (5.7)."""
    with app.producer_pool.acquire(block=True) as producer:
        if not hasattr(producer, "batch"):
            yield {"producer": producer}
            return
        with producer.batch():
            yield {"producer": producer}


@worker_ready.connect
def _ready(**_: object) -> None:
    if LEDGER in os.environ:
        Path(os.environ[LEDGER]).with_suffix(".ready").touch()


if BROKER in os.environ:  # in a worker
    app = create_app(os.environ[BROKER])
    if EXTENDED in os.environ:
        from celery_ext import install

        app.conf.delayed_outcomes = os.environ[EXTENDED] == "yes"
        install(app)
