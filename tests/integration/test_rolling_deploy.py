"""Workers and producers of the previous version and of this one share queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.kit.connections import forget_connections
from tests.kit.ledger import Ledger
from tests.kit.previous import Previous, install_previous
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = [pytest.mark.thorough, pytest.mark.crash]

QUEUES = ("celery", "mail")
PRIORITIES = (0, 3, 5, 6, 9)
#: Long enough that a machine under load renews it, short enough to wait for after a kill.
LEASE_SECONDS = 10.0


@pytest.fixture(scope="module")
def previous() -> Previous:
    return install_previous()


@pytest.fixture
def settings(server: Server, ledger: Ledger) -> Settings:
    options = {"delayed_lease_seconds": LEASE_SECONDS}
    config = {"worker_prefetch_multiplier": 1}
    return Settings(f"delayed+{server.url}", None, options, str(ledger.path), config)


@pytest.fixture
def senders(previous: Previous, settings: Settings) -> Iterator[list[Callable[..., str]]]:
    """One producer of each version: called with a task's name and the options of `send_task`."""
    forget_connections()  # no connection that knew the server before it was emptied
    with ExitStack() as stack:
        app = stack.enter_context(make_app(settings))
        old = stack.enter_context(previous.producer(settings))
        yield [old.send, lambda name, **options: app.send_task(name, **options).id]


def start(
    previous: Previous, settings: Settings, directory: Path, **options: Any
) -> tuple[Worker, Worker]:
    old = previous.worker(settings, directory, name="old", queues=QUEUES, **options)
    new = Worker(settings, directory, name="new", queues=QUEUES, **options)
    old.start(wait=False)
    new.start(wait=False)
    return old, new


def send_some(senders: list[Callable[..., str]], count: int) -> list[str]:
    return [
        send(
            "record" if n % 2 else "late",
            queue=QUEUES[n % len(QUEUES)],
            priority=PRIORITIES[n % len(PRIORITIES)],
            countdown=None if n % 3 == 0 else n % 7 / 2,
        )
        for n in range(count)
        for send in senders
    ]


def started(ledger: Ledger) -> dict[str, list[str]]:
    """Task id -> the workers that began it."""
    found: dict[str, list[str]] = {}
    for entry in ledger.entries():
        if entry.get("phase") != "end":
            found.setdefault(entry["id"], []).append(entry["worker"])
    return found


def left_over(client: redis.Redis) -> dict[str, int]:
    """The messages that are left in any place."""
    found: dict[str, int] = {}
    for queue in QUEUES:
        for key in client.keys(f"{{{queue}}}:unacked:*"):
            found[key.decode()] = client.hlen(key)
        for key in (f"{{{queue}}}:messages", f"{{{queue}}}:dead-messages"):
            found[key] = client.hlen(key)
        for step in ("", *(f"\x06\x16{n}" for n in range(1, 10))):
            found[queue + step] = client.llen(queue + step)
    return {key: count for key, count in found.items() if count}


@pytest.mark.parametrize("dies", ["old", "new"])
def test_the_other_version_takes_over(
    previous: Previous,
    settings: Settings,
    senders: list[Callable[..., str]],
    ledger: Ledger,
    client: redis.Redis,
    tmp_path: Path,
    dies: str,
) -> None:
    """Tasks that the killed worker had started may begin again; all others run once."""
    workers = start(previous, settings, tmp_path, pool="solo")
    victim, survivor = workers if dies == "old" else reversed(workers)
    with ExitStack() as stack:
        stack.callback(victim.kill)
        stack.callback(survivor.kill)
        long = {
            send("late", queue="mail", kwargs={"seconds": 3}, countdown=at)
            for at in (None, 0.5)
            for send in senders
        }
        ids = [*long, *send_some(senders, 20)]
        ledger.wait(
            lambda entries: any(
                entry["id"] in long and entry["worker"] == victim.name for entry in entries
            ),
            "the victim executes a long task",
        )
        victim.kill()
        executed = {id for id, by in started(ledger).items() if victim.name in by}
        ids += send_some(senders, 10)
        ledger.wait_for_all(ids)
        wait_until(lambda: not left_over(client), "all are acked")
        assert {id for id, by in started(ledger).items() if len(by) > 1} <= executed


def test_a_large_queue_stays_where_both_find_its_messages(
    senders: list[Callable[..., str]], client: redis.Redis
) -> None:
    """This is so although no worker of the previous version consumes it and could be noticed."""
    old, new = senders
    unique = {"delayed_unique": "k", "delayed_conflict": "replace"}
    old("record", queue="mail", countdown=3600)
    for _ in range(300):
        new("record", queue="mail", countdown=3600, kwargs={"text": "x" * 2000})
    new("record", queue="mail", countdown=3600, headers=unique)
    assert client.hlen("{mail}:messages") == 302
    old("record", queue="mail", countdown=3600, headers=unique)
    assert client.hlen("{mail}:messages") == 302


@pytest.mark.parametrize("first", ["old", "new"])
def test_a_fleet_is_replaced(
    previous: Previous,
    settings: Settings,
    senders: list[Callable[..., str]],
    ledger: Ledger,
    client: redis.Redis,
    tmp_path: Path,
    first: str,
) -> None:
    """Each version runs messages that the other was sent and has claimed."""
    old, new = start(previous, settings, tmp_path, pool="solo")
    leaves, stays = (old, new) if first == "old" else (new, old)
    with ExitStack() as stack:
        stack.callback(old.kill)
        stack.callback(new.kill)
        ids = send_some(senders, 20)
        for worker in (old, new):
            worker.wait_until_ready()
        ids += send_some(senders, 20)
        leaves.stop()
        ids += send_some(senders, 20)
        ledger.wait_for_all(ids)
        wait_until(lambda: not left_over(client), "all are acked")
        assert {id: by for id, by in started(ledger).items() if len(by) > 1} == {}
        assert stays.running
