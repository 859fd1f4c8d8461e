"""One task of Huey: `python with_huey.py COMMAND …`, or the instance for its consumer."""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import time
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huey import RedisHuey

LINE = struct.Struct("<qdd")
WARM_UP = 200

huey = RedisHuey("peers", url=os.environ["PEER_BROKER"], results=False)
ledger = -1


@huey.task()
def work(number: int = 0, due: float = 0.0) -> None:
    global ledger
    if ledger < 0:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        ledger = os.open(os.environ["PEER_LEDGER"], flags, 0o600)
    os.write(ledger, LINE.pack(number, due, time.time()))


@huey.on_startup()
def ready() -> None:
    Path(os.environ["PEER_LEDGER"]).with_suffix(".ready").touch()


def versions() -> str:
    return f"huey {version('huey')}"


def send(count: int) -> float:
    """Tasks per second, with due times an hour ahead."""
    for _ in range(WARM_UP):
        work.schedule(delay=3600)
    began = time.perf_counter()
    for _ in range(count):
        work.schedule(delay=3600)
    return count / (time.perf_counter() - began)


def fill(count: int) -> None:
    for number in range(count):
        work(number)


def steady(count: int, rate: int) -> None:
    chance, began = random.Random(1), time.time()
    for number in range(count):
        time.sleep(max(began + number / rate - time.time(), 0))
        due = time.time() + chance.uniform(1, 10)
        work.schedule((number, due), eta=datetime.fromtimestamp(due))


def at(count: int, due: float) -> None:
    for number in range(count):
        work.schedule((number, due), eta=datetime.fromtimestamp(due))


def main() -> None:
    commands = {each.__name__: each for each in (versions, send, fill, steady, at)}
    name, *numbers = sys.argv[1:]
    found: Any = commands[name](*(json.loads(each) for each in numbers))
    print(json.dumps(found))


if __name__ == "__main__":
    # Huey names a task by its module, which must be the one that the consumer imports.
    import with_huey

    with_huey.main()
