"""One task of Celery, on any broker: `python with_celery.py COMMAND …`, or an app for a worker.

It needs nothing of this repository, as some brokers have an environment of their own.
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready

LINE = struct.Struct("<qdd")
WARM_UP = 200

if os.environ.get("PEER_IMPORT"):
    __import__(os.environ["PEER_IMPORT"])

app = Celery("peers", broker=os.environ["PEER_BROKER"])
app.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    **json.loads(os.environ.get("PEER_SETTINGS", "{}")),
)
ledger = -1


@app.task(name="work")
def work(number: int = 0, due: float = 0.0) -> None:
    global ledger
    if ledger < 0:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        ledger = os.open(os.environ["PEER_LEDGER"], flags, 0o600)
    os.write(ledger, LINE.pack(number, due, time.time()))


@worker_ready.connect
def ready(**_: object) -> None:
    Path(os.environ["PEER_LEDGER"]).with_suffix(".ready").touch()


def versions() -> str:
    names = [os.environ.get("PEER_PACKAGE"), "celery", "kombu"]
    return ", ".join(f"{name} {version(name)}" for name in names if name)


def send(count: int) -> float:
    """Tasks per second, with due times an hour ahead."""
    for _ in range(WARM_UP):
        work.apply_async(countdown=3600)
    began = time.perf_counter()
    for _ in range(count):
        work.apply_async(countdown=3600)
    return count / (time.perf_counter() - began)


def fill(count: int) -> None:
    for number in range(count):
        work.apply_async((number,))


def steady(count: int, rate: int) -> None:
    chance, began = random.Random(1), time.time()
    for number in range(count):
        time.sleep(max(began + number / rate - time.time(), 0))
        countdown = chance.uniform(1, 10)
        work.apply_async((number, time.time() + countdown), countdown=countdown)


def at(count: int, due: float) -> None:
    eta = datetime.fromtimestamp(due, timezone.utc)
    for number in range(count):
        work.apply_async((number, due), eta=eta)


def alone(count: int) -> None:
    """Send and run tasks in the same process: for Kombu's in-memory transport."""
    fill(count)
    app.worker_main(["worker", "-c", "2", "--without-mingle", "--without-gossip"])


if __name__ == "__main__":
    commands = {each.__name__: each for each in (versions, send, fill, steady, at, alone)}
    name, *numbers = sys.argv[1:]
    found: Any = commands[name](*(json.loads(each) for each in numbers))
    print(json.dumps(found))
