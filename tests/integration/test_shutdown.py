"""Where messages are after workers are told to exit, killed, or stopped for a while."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import celery
import pytest
import redis
from celery import Celery
from kombu import Connection

from kombu_delayed.connection import connection as connection_module
from kombu_delayed.store.claimable import Claimable
from tests.kit.extended import MODULE as EXTENDED
from tests.kit.inbox import Inbox
from tests.kit.ledger import Ledger
from tests.kit.mail import MAIL, publish
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.unheard_app import VARIABLE as UNHEARD_VARIABLE
from tests.kit.wait import Stopwatch, wait_until
from tests.kit.workers import Worker

pytestmark = [pytest.mark.thorough, pytest.mark.crash]

KIND = available_kinds()[0]
#: Long enough that nothing comes back because a lease expires.
LONG_LEASE_SECONDS = 60
LEASE_SECONDS = 1.0
UNHEARD = "tests.kit.unheard_app"


@dataclass
class Bench:
    """The server of one test, with its workers."""

    server: Server
    ledger: Ledger
    directory: Path
    client: redis.Redis
    workers: ExitStack

    def worker(self, settings: Settings, name: str = "w1", **options: Any) -> Worker:
        worker = Worker(settings, self.directory, name=name, **options)
        self.workers.callback(worker.kill)
        return worker

    def settings(self, lease_seconds: float, **config: Any) -> Settings:
        options = {"delayed_lease_seconds": lease_seconds}
        url = f"delayed+{self.server.url}"
        return Settings(url, None, options, str(self.ledger.path), config)

    @property
    def app(self) -> Celery:
        return make_app(self.settings(LONG_LEASE_SECONDS))

    @property
    def unacked(self) -> int:
        return sum(self.client.hlen(key) for key in self.client.keys("{celery}:unacked:*"))

    @property
    def queued(self) -> list[str]:
        """The ids of the ready tasks, the head of the queue first."""
        texts = self.client.lrange("celery", 0, -1)
        return [json.loads(text)["headers"]["id"] for text in reversed(texts)]

    def wait_for_active(self, count: int) -> None:
        """Celery cancels only tasks it knows to be active, and learns that after they begin."""

        def active() -> int:
            found = self.app.control.inspect(timeout=1).active() or {}
            return sum(map(len, found.values()))

        wait_until(lambda: active() >= count, f"{count} tasks are known to be active")

    def wait_for_processes(self, count: int) -> list[int]:
        """Celery gives a process of its pool no task before it knows that the process is up."""

        def up() -> list[int]:
            found = self.app.control.inspect(timeout=1).stats() or {}
            pools = [each["pool"] for each in found.values()]
            return [
                process
                for pool in pools
                if pool["writes"]["inqueues"]["total"] >= count
                for process in pool["processes"]
            ]

        return wait_until(up, f"{count} processes are up")

    def send(self, count: int, end: str = "may-end", **options: Any) -> list[str]:
        """Send tasks that run until they may end: see `release`."""
        path = str(self.directory / end)
        return [self.app.send_task("late_until", (path,), **options).id for _ in range(count)]

    def release(self, end: str = "may-end") -> None:
        (self.directory / end).touch()

    def load(self, worker: Worker, count: int = 8, **options: Any) -> list[str]:
        """Start a worker that runs some tasks, until they are released, and has claimed others."""
        ids = self.send(count, **options)
        worker.start()
        self.ledger.wait_for(1)
        wait_until(lambda: self.unacked > 1, "it has claimed more than it runs")
        return ids

    def phases(self, id: str) -> list[str]:
        return [run["phase"] for run in self.ledger.of(id)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with (
        start_server(KIND, tmp_path / "server", port=0) as server,
        server.client() as client,
        ExitStack() as workers,
    ):
        yield Bench(server, Ledger(tmp_path / "ledger"), tmp_path, client, workers)


def send(worker: Worker, *numbers: int) -> None:
    for number in numbers:
        before = len(worker.log)
        worker.send_signal(number)
        wait_until(
            lambda before=before: not worker.running or len(worker.log) > before, "it has heard", 5
        )


COLD = {
    "SIGQUIT": (signal.SIGQUIT,),
    "SIGINT twice": (signal.SIGINT, signal.SIGINT),
    "SIGTERM, SIGQUIT": (signal.SIGTERM, signal.SIGQUIT),
}


def hold(connection: Connection, *bodies: str, received: int = 1) -> Inbox:
    """Publish messages and consume them without acks; so many have been handed out."""
    inbox = Inbox(connection, MAIL, prefetch_count=5, ack=False)
    publish(connection, *bodies)
    inbox.receive(received)
    return inbox


@pytest.mark.parametrize(
    ("pool", "how"),
    [
        ("prefork", "SIGQUIT"),
        ("prefork", "SIGINT twice"),
        ("gevent", "SIGQUIT"),
        ("solo", "SIGTERM, SIGQUIT"),
    ],
)
def test_cold_shutdown_returns_everything_within_a_second(
    bench: Bench, pool: str, how: str
) -> None:
    worker = bench.worker(bench.settings(LONG_LEASE_SECONDS), pool=pool, concurrency=2)
    ids = bench.load(worker)
    if pool != "solo":  # which answers nobody while it runs a task
        bench.wait_for_active(2)
    *first, last = COLD[how]
    send(worker, *first)
    if first:  # a signal that interrupts the return of messages changes the order
        running = 1 if pool == "solo" else 2
        wait_until(lambda: bench.unacked == running, "what was not begun is back")
    send(worker, last)
    told = Stopwatch(worker.pid, bench.server.pid)
    wait_until(lambda: bench.unacked == 0, "all is back")
    assert told.seconds < 1
    worker.wait()
    assert bench.queued == ids
    assert not any("end" in bench.phases(id) for id in ids)
    assert bench.client.exists("{celery}:consumers", "{celery}:dead") == 0


def test_cold_shutdown_returns_everything_when_its_signals_come_at_once(bench: Bench) -> None:
    worker = bench.worker(bench.settings(LONG_LEASE_SECONDS))
    ids = bench.load(worker)
    send(worker, *COLD["SIGTERM, SIGQUIT"])
    worker.wait()
    assert bench.unacked == 0
    assert sorted(bench.queued) == sorted(ids)


def test_cold_shutdown_needs_no_lock_that_another_signal_has_left_locked(bench: Bench) -> None:
    worker = bench.worker(bench.settings(LONG_LEASE_SECONDS))
    id = bench.app.send_task("torn").id
    worker.start()
    bench.ledger.wait_for(1)
    worker.send_signal(signal.SIGQUIT)
    worker.wait()
    assert bench.queued == [id]


@pytest.mark.parametrize("how", ["SIGQUIT", "SIGTERM, SIGQUIT"])
def test_cold_shutdown_waits_for_threads(bench: Bench, how: str) -> None:
    """Celery cannot stop a thread: while it runs, no other worker may have its message."""
    worker = bench.worker(bench.settings(LONG_LEASE_SECONDS), pool="threads", concurrency=2)
    ids = bench.load(worker)
    bench.ledger.wait_for(2)
    send(worker, *COLD[how])
    wait_until(lambda: bench.unacked == 2, "what was not begun is back")
    bench.release()
    worker.wait()
    begun = [id for id in ids if bench.phases(id)]
    assert [bench.phases(id) for id in begun] == [["start", "end"]] * 2
    assert bench.queued == [id for id in ids if id not in begun]
    assert bench.client.exists("{celery}:consumers", "{celery}:dead") == 0
    # An error of the signal's handler would interrupt the event loop, for example in an ack.
    assert "NotImplementedError" not in worker.log


@pytest.mark.parametrize("error", [None, NotImplementedError])
def test_a_signal_handler_cancels_while_a_message_is_handed_over(
    connection: Connection,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception] | None,
) -> None:
    """Celery's handler does so in a cold shutdown: the message must not count as invalid."""
    inbox = Inbox(connection, MAIL)
    (tag,) = inbox.consumer._active_tags.values()
    channel = inbox.consumer.channel

    handle = channel._handlers["mail"]

    def cancel(payload: dict[str, Any]) -> None:
        channel._basic_cancel(tag)
        if error:
            raise error
        handle(payload)

    monkeypatch.setitem(channel._handlers, "mail", cancel)
    publish(connection, "x", *([] if error else ["y"]))
    with pytest.raises(error) if error else contextlib.nullcontext():
        assert inbox.receive(1) == ["x"]
    connection.close()
    assert client.llen("mail") == 1
    assert client.exists("{mail}:dead") == 0


def test_an_error_of_a_signal_handler_is_no_attempt(
    connection: Connection, client: redis.Redis
) -> None:
    """A task that has begun may continue in a thread: it failed only if its own code raised."""
    inbox = Inbox(connection, MAIL, ack=False)
    channel = inbox.consumer.channel

    def begin(message: Any) -> None:
        channel.handed_out.waits(message.delivery_tag)
        assert channel.handed_out.begins(message.delivery_tag)
        channel.retire()
        raise NotImplementedError

    inbox.consumer.on_message = begin
    publish(connection, "x")
    with pytest.raises(NotImplementedError):
        connection.drain_events(timeout=5)
    connection.close()
    (text,) = client.lrange("mail", 0, -1)
    assert json.loads(text).get("deliveries", 0) == 0


@pytest.mark.parametrize("when", ["opened", "handed over"])
def test_what_is_being_handed_over_goes_back_with_the_others(
    connection: Connection,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    """They return in order, if the program reports when it begins a message."""
    inbox = Inbox(connection, MAIL, prefetch_count=5, ack=False)
    channel, handed = inbox.consumer.channel, []
    opener = channel.consumer.parts[0].opener
    opened = opener.open

    def open_some(*given: Any) -> Any:
        if handed and when == "opened":
            channel.retire()
        return opened(*given)

    monkeypatch.setattr(opener, "open", open_some)

    def take(message: Any) -> None:
        if message.payload == "b":
            channel.retire()
        channel.handed_out.waits(message.delivery_tag)
        handed.append(message.delivery_tag)
        assert handed[1:] == [] or when == "handed over"

    inbox.consumer.on_message = take
    publish(connection, *"abc")
    while client.llen("mail") < 3:
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.05)
    assert not any(map(channel.handed_out.begins, handed))
    assert client.llen("mail") == 3
    with connection.clone() as other:
        assert Inbox(other, MAIL).receive(3) == ["a", "b", "c"]


@pytest.mark.parametrize("when", ["_send", "read"])
def test_what_a_claim_brings_goes_back_when_its_queue_is_cancelled_meanwhile(
    connection: Connection,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    """They go back at once: the signal handler may then take as long as a task."""
    inbox = Inbox(connection, MAIL, prefetch_count=5, ack=False)
    channel = inbox.consumer.channel
    store, ends, waits = channel.store, [], []
    deliver, place = store.deliver, store.run if when == "_send" else connection_module
    wait = connection_module.wait_readable
    monkeypatch.setattr(
        connection_module, "wait_readable", lambda *given: waits.append(wait(*given))
    )
    publish(connection, *"abc")

    def claim(*given: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            step = getattr(place, when)

            def interrupted(*args: Any) -> Any:
                patch.undo()
                channel.retire()
                ends.append(client.llen("mail"))
                return step(*args)

            patch.setattr(place, when, interrupted)
            return deliver(*given, **options)

    monkeypatch.setattr(store, "deliver", claim)
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.1)
    assert ends == [3]
    assert len(waits) == (when == "read")  # the server may not have done the claim before
    assert client.llen("mail") == 3
    assert client.hlen(f"{{mail}}:unacked:{channel.consumer.lease.consumer}") == 0


@pytest.mark.parametrize("hears", ["the keeper", "the consumer", "nobody"])
def test_nothing_is_begun_whose_lease_is_heard_to_have_ended_while_that_is_asked(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, hears: str
) -> None:
    """Another thread learns it, and closes the connection of the renewal."""
    inbox = hold(connection, "x")
    channel, tag = inbox.consumer.channel, inbox.messages[0].delivery_tag
    channel.handed_out.waits(tag)
    lease = channel.consumer.lease

    def renew(*_: Any) -> None:
        if hears == "the keeper":
            lease.lost = True
        elif hears == "the consumer":
            channel.consumer.session.start_anew()
        raise redis.ConnectionError("closed")

    monkeypatch.setattr(lease, "may_have_ended", lambda queue: True)
    monkeypatch.setattr(lease, "renew", renew)
    assert channel.handed_out.begins(tag) is (hears == "nobody")


@pytest.mark.parametrize(
    ("holder", "move"),
    [("qos", "give_back_reserved"), ("store", "release"), ("announcing", "announce_soon")],
)
def test_giving_back_that_was_interrupted_is_done_again(
    connection: Connection,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    holder: str,
    move: str,
) -> None:
    """The handler of another signal interrupts it by raising."""
    inbox = hold(connection, *"abc")
    channel = inbox.consumer.channel
    with monkeypatch.context() as patch:
        owner = Claimable if holder == "announcing" else getattr(channel, holder)
        patch.setattr(owner, move, raising)
        with pytest.raises(NotImplementedError):
            channel.retire()
    channel.retire()
    assert client.llen("mail") == 2
    assert not inbox.drain(0.2)[1:]


def test_a_signal_handler_gives_back_what_it_has_interrupted_the_giving_back_of(
    connection: Connection, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = hold(connection, *"abc")
    channel = inbox.consumer.channel
    release, found = channel.store.release, []

    def release_with_a_signal(*args: Any, **options: Any) -> Any:
        if not found:
            found.append(0)
            channel.retire()
            found.append(client.llen("mail"))
        return release(*args, **options)

    monkeypatch.setattr(channel.consumer.store, "release", release_with_a_signal)
    channel.retire()
    assert found == [0, 2], "in the handler, which may take its time afterwards"
    assert client.llen("mail") == 2
    assert not channel.qos.outbox.done


def test_nobody_waits_for_a_thread_that_tells_the_server(
    connection: Connection, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may have interrupted that thread and would wait for it for ever."""
    inbox = hold(connection, "a", "b", received=2)
    store = inbox.consumer.channel.consumer.store
    ack, others = store.ack, list[threading.Thread]()

    def ack_beside_another(*args: Any, **options: Any) -> Any:
        if not others:
            others.append(threading.Thread(target=inbox.messages[1].ack))
            others[0].start()
            others[0].join(5)
            assert not others[0].is_alive()
        return ack(*args, **options)

    monkeypatch.setattr(store, "ack", ack_beside_another)
    inbox.messages[0].ack()
    connection.close()
    assert client.exists("mail", "{mail}:consumers") == 0


def raising(*args: object, **options: object) -> None:
    raise NotImplementedError


def in_python(module: str) -> list[str]:
    """A worker with a pool of threads, started by a program of its own."""
    options = "pool='threads', concurrency=2, loglevel='INFO'"
    alone = "without_mingle=True, without_gossip=True"
    start = f"app.Worker(hostname='w1@test', {options}, {alone}).start()"
    return [sys.executable, "-c", f"from {module} import app; {start}"]


COMMANDS = {
    "python": in_python("tests.kit.tasks_app"),
    "python, extended": in_python(EXTENDED),
}


@pytest.mark.parametrize(
    ("pool", "name"),
    [
        ("prefork", "SIGTERM"),
        ("threads", "SIGTERM"),
        ("solo", "SIGTERM"),
        ("gevent", "SIGTERM"),
        ("prefork", "SIGINT"),
        *((name, "SIGTERM") for name in COMMANDS),
    ],
)
def test_warm_shutdown_finishes_what_runs(bench: Bench, pool: str, name: str) -> None:
    """Other tasks are back within a second, while Celery may be busy with the running ones."""
    setup, command = bench.settings(LONG_LEASE_SECONDS), COMMANDS.get(pool)
    worker = bench.worker(setup, pool=pool, concurrency=2, command=command)
    later = bench.app.send_task("record", countdown=3600).id
    ids = bench.load(worker)
    running = 1 if pool == "solo" else 2
    bench.ledger.wait_for(running)
    told = Stopwatch(worker.pid, bench.server.pid)
    worker.send_signal(signal.Signals[name])
    wait_until(lambda: bench.client.llen("celery") == len(ids) - running, "it is back", 10)
    assert told.seconds < 1
    bench.release()
    assert worker.wait() == (0 if name == "SIGTERM" else 1)  # as Celery has it
    begun = set(bench.ledger.ids())
    assert len(begun) == running
    assert all(bench.phases(id) == ["start", "end"] for id in begun)
    # In any order: messages of a claim that was under way are given back after the others.
    assert sorted(bench.queued) == sorted(set(ids) - begun)
    assert bench.client.hkeys("{celery}:messages") == [later.encode()]
    assert bench.client.exists("{celery}:consumers", "{celery}:dead") == 0


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_warm_shutdown_returns_tasks_that_expire(bench: Bench, pool: str) -> None:
    """Celery asks of these alone whether they are revoked as soon as they arrive."""
    worker = bench.worker(bench.settings(LONG_LEASE_SECONDS), pool=pool, concurrency=2)
    ids = bench.load(worker, expires=3600)
    bench.ledger.wait_for(2)
    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: bench.client.llen("celery") == len(ids) - 2, "it is back")
    bench.release()
    assert worker.wait() == 0
    assert len(set(bench.ledger.ids())) == 2


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_warm_shutdown_acks_each_task_when_it_ends(bench: Bench, pool: str) -> None:
    """It does not wait for the last task: the worker or the server may be gone by then."""
    settings = bench.settings(LONG_LEASE_SECONDS, task_acks_late=True)
    worker = bench.worker(settings, pool=pool, concurrency=2)
    ends = [bench.directory / name for name in ("first", "second")]
    for each in ends:
        bench.app.send_task("until", (str(each),))
    worker.start()
    bench.ledger.wait_for(2)
    worker.send_signal(signal.SIGTERM)
    worker.wait_for_log("Warm shutdown")
    for number, each in enumerate(ends):
        assert bench.unacked == 2 - number
        each.touch()
        wait_until(lambda left=1 - number: bench.unacked == left, "it is acked")
    worker.wait()
    assert bench.queued == []


BUSY_POOLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without prefetching": {"worker_disable_prefetch": True},
    "autoscale": {"worker_autoscaler": "celery.worker.autoscale:Autoscaler"},
    "max tasks per child": {"worker_max_tasks_per_child": 1},
    "prefetching much": {"worker_prefetch_multiplier": 50},
}


def deaf_worker(bench: Bench, options: Sequence[str] = (), **config: Any) -> Worker:
    """A worker with two processes, from which it reads nothing until it is told to end."""
    deaf = bench.directory / "deaf"
    worker = bench.worker(
        bench.settings(LONG_LEASE_SECONDS, **config),
        pool="prefork",
        concurrency=2,
        module=UNHEARD,
        env={UNHEARD_VARIABLE: str(deaf)},
        options=options,
    )
    worker.start()
    bench.wait_for_processes(2)
    deaf.touch()
    return worker


@pytest.mark.parametrize(
    ("kind", "task"), [("plain", "late"), *((kind, "record") for kind in BUSY_POOLS)]
)
def test_a_warm_shutdown_repeats_nothing_that_its_pool_has_run(
    bench: Bench, kind: str, task: str
) -> None:
    """The worker does not know yet that the tasks were begun when it is told to exit.

    Celery's own shutdown would wait 30 s, which is longer than `stop` does, for their results.
    """
    options = ["--autoscale=4,2"] if kind == "autoscale" else []
    worker = deaf_worker(bench, options, **BUSY_POOLS[kind])
    ids = [bench.app.send_task(task).id for _ in range(8)]
    bench.ledger.wait_for(2 if task == "record" else 4)
    worker.stop()
    ran = set(bench.ledger.ids())
    assert len(ran) == 2
    assert bench.unacked == 0
    assert bench.queued == [id for id in ids if id not in ran]


def test_a_cold_shutdown_ends_tasks_of_which_the_worker_did_not_know(bench: Bench) -> None:
    """It has not read yet that they began, so Celery does not cancel them with the others."""
    worker = deaf_worker(bench)
    _, late = (bench.app.send_task(task, [3600]).id for task in ("sleep", "late"))
    bench.ledger.wait_for(2)
    worker.stop(signal.SIGQUIT)
    assert bench.unacked == 0
    assert bench.queued == [late]


def test_a_warm_shutdown_writes_a_task_to_its_end(bench: Bench) -> None:
    """A process has read a part of it when the worker is told to exit."""
    worker = bench.worker(bench.settings(LONG_LEASE_SECONDS), pool="prefork")
    worker.start()
    (process,) = bench.wait_for_processes(1)
    os.kill(process, signal.SIGSTOP)
    task = bench.app.send_task("late", kwargs={"seconds": 0, "payload": "x" * 1_000_000})
    wait_until(lambda: bench.unacked == 1, "it was claimed")
    bench.wait_for_processes(1)  # the event loop has made a turn since
    worker.send_signal(signal.SIGTERM)
    worker.wait_for_log("Warm shutdown")
    os.kill(process, signal.SIGCONT)
    worker.wait()
    assert bench.phases(task.id) == ["start", "end"]
    assert bench.unacked == bench.client.llen("celery") == 0


@pytest.mark.skipif(celery.VERSION < (5, 5), reason="new in Celery 5.5")
@pytest.mark.parametrize("pool", ["prefork", "gevent", "eventlet"])
def test_soft_shutdown_waits_and_returns_the_rest(bench: Bench, pool: str) -> None:
    config = {"worker_soft_shutdown_timeout": 2.0}
    setup = bench.settings(LONG_LEASE_SECONDS, **config)
    worker = bench.worker(setup, pool=pool, concurrency=2)
    worker.start()
    short, long = *bench.send(1, "short"), *bench.send(1)
    bench.ledger.wait_for(2)
    others = bench.send(4)
    # The event loop of greenlets claims no more while a task waits for a greenlet.
    wait_until(lambda: bench.unacked >= (6 if pool == "prefork" else 3), "it has claimed them")
    told = Stopwatch(worker.pid, bench.server.pid)
    worker.send_signal(signal.SIGQUIT)
    wait_until(lambda: bench.queued == others, "what was not begun is back")
    assert told.seconds < 1
    assert worker.running, "it waits for the tasks"
    bench.release("short")
    worker.wait()
    assert (bench.phases(short), bench.phases(long)) == (["start", "end"], ["start"])
    assert bench.unacked == 0
    assert bench.queued == [long, *others]


def test_what_a_killed_worker_held_is_back_within_its_lease(bench: Bench) -> None:
    setup = bench.settings(LEASE_SECONDS)
    worker = bench.worker(setup, pool="prefork", concurrency=2)
    ids = bench.load(worker, 4)
    with bench.worker(setup, "heir", pool="threads", concurrency=9) as heir:
        worker.kill()
        killed = Stopwatch(heir.pid, bench.server.pid)
        runs = bench.ledger.wait(
            lambda all: {e["id"] for e in all if e["worker"] == heir.name} == set(ids), "all run"
        )
        assert killed.seconds < LEASE_SECONDS + 1
        assert all(run["redelivered"] for run in runs if run["worker"] == heir.name)
        heir.kill()


@pytest.mark.parametrize(("pool", "how"), [("prefork", "flushall"), ("threads", "restart")])
def test_a_worker_runs_what_it_holds_when_the_server_has_lost_its_data(
    bench: Bench, pool: str, how: str
) -> None:
    """No other worker can have it: the worker's lease lasts by its own clock."""
    worker = bench.worker(bench.settings(LONG_LEASE_SECONDS), pool=pool, concurrency=2)
    ids = bench.load(worker, 4)
    wait_until(lambda: bench.unacked == 4, "it has claimed all")
    if how == "flushall":
        bench.client.flushall()
    else:
        bench.server.kill()
        bench.server.start()
    bench.release()
    bench.ledger.wait(lambda all: sum(e["phase"] == "end" for e in all) == 4, "all have run")
    more = bench.app.send_task("late").id
    bench.ledger.wait(lambda all: sum(e["phase"] == "end" for e in all) == 5, "the last has run")
    assert bench.ledger.runs() == dict.fromkeys([*ids, more], 2)
    assert "The server has lost its data" in worker.log
    assert "it starts again" not in worker.log
    worker.stop()
    assert bench.unacked == 0


@pytest.mark.parametrize("pool", ["prefork", "gevent", "python, extended"])
def test_a_worker_that_was_stopped_beyond_its_lease(bench: Bench, pool: str) -> None:
    """Tasks that it ran may run twice; those it had not started run once, elsewhere."""
    setup = bench.settings(LEASE_SECONDS)
    command = COMMANDS.get(pool)
    frozen = bench.worker(setup, pool=pool, concurrency=2, command=command)
    ids = bench.load(frozen)
    bench.ledger.wait_for(2)  # a process begins every task it was given
    os.killpg(frozen.pid, signal.SIGSTOP)
    begun = set(bench.ledger.ids())
    with bench.worker(setup, "heir", pool="threads", concurrency=9) as heir:
        for phase in ("start", "end"):
            bench.ledger.wait(
                lambda all, phase=phase: (
                    {e["id"] for e in all if e["worker"] == heir.name and e["phase"] == phase}
                    >= set(ids)
                ),
                f"the other one has run all to the {phase}",
            )
            bench.release()
        os.killpg(frozen.pid, signal.SIGCONT)
        frozen.wait_for_log("it starts again")
        for id in begun:
            bench.ledger.wait(
                lambda all, id=id: sum(e["id"] == id and e["phase"] == "end" for e in all) == 2,
                "what ran when it was stopped ends",
            )
        again = [bench.app.send_task("record", countdown=0.1).id for _ in range(20)]
        bench.ledger.wait_for_all(again)
        starts = [
            (e["id"], e["worker"]) for e in bench.ledger.entries() if e.get("phase") == "start"
        ]
        assert {id for id, name in starts if name == frozen.name} == begun
        assert len(starts) == len(ids) + len(begun)
        assert frozen.log.count("and others get its messages") == 1
        wait_until(lambda: bench.unacked == 0, "nothing is held")
        assert bench.client.llen("celery") == bench.client.zcard("{celery}:dead") == 0
        assert frozen.stop() == 0


def test_an_extended_worker_without_acks_runs_its_tasks(bench: Bench) -> None:
    setup = bench.settings(LEASE_SECONDS)
    setup.transport_options["ack_emulation"] = False
    worker = bench.worker(setup, pool="threads", concurrency=2, module=EXTENDED)
    worker.start()
    bench.ledger.wait_for_all([bench.app.send_task("record").id for _ in range(5)])
