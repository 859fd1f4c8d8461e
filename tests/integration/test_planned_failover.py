"""A new master is chosen while the old one is healthy and accepts writes that will be lost."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from kombu_delayed.connection.sentinel import watch as sentinel_watch
from tests.kit import mail
from tests.kit.inbox import Connect, Inbox
from tests.kit.ledger import Ledger
from tests.kit.mail import MAIL
from tests.kit.producers import Producers
from tests.kit.sentinels import HURRY, UNHURRIED, Group
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

#: Longer than a failover takes, and some leases.
BUSY_SECONDS = 15


@pytest.fixture
def hurried(shared_group: Group) -> None:
    shared_group.pace(HURRY)


@pytest.fixture
def group(hurried: None, group: Group) -> Group:
    group.pace(UNHURRIED)
    return group


@pytest.fixture
def connect(connect_group: Connect) -> Connect:
    return connect_group


def scripts_run(group: Group, server: Server) -> int:
    with group.client(server) as client:
        found: Any = client.info("commandstats")
    return sum(found.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


publish = partial(mail.publish, retry=True)


@pytest.mark.crash
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_workers_and_producers_leave_the_old_master(
    group: Group, ledger: Ledger, tmp_path: Path, pool: str
) -> None:
    """They leave long before it becomes a replica, and each accepted task runs exactly once."""
    options = {**group.options, "delayed_replicas_to_wait": 1, "delayed_lease_seconds": 3.0}
    setup = Settings(f"delayed+{group.url}", None, options, str(ledger.path))
    worker = Worker(setup, tmp_path, pool=pool, concurrency=2)
    with worker, make_app(setup) as app:
        with Producers(
            lambda n: app.send_task("record", countdown=n % 3, retry=False).id
        ) as producers:
            producers.send_more()
            ledger.wait_for(20)
            before = {*producers.sent}
            old = group.switch()

            def all_have_left() -> bool:
                count, done = scripts_run(group, old), len(ledger.entries())
                producers.send_more()
                ledger.wait_for(done + 20)
                return scripts_run(group, old) == count

            wait_until(all_have_left, "nothing is sent to the old master")
            assert group.is_master(old)
            during = {*producers.sent} - before
            producers.send_more()
            producers.stop()
        ledger.wait_for_all(producers.sent)
        runs = ledger.runs()
        assert not [id for id in producers.sent if runs[id] > 1 and id not in during]
        wait_until(lambda: not group.is_master(old), "the old master is a replica", 60)
        ledger.wait_for_all([app.send_task("record").id])


@pytest.mark.crash
def test_what_comes_in_the_middle_of_a_failover_is_kept(
    group: Group, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes processes that missed the start of the failover."""
    options = {"delayed_replicas_to_wait": 1}
    publish(connect(**options), "first")
    with ThreadPoolExecutor(1) as pool:
        switching = pool.submit(group.switch)
        accepted = ["first"]
        while not switching.done():
            monkeypatch.setattr(sentinel_watch, "_watches", {})  # as in a new process
            accepted.append(str(len(accepted)))
            publish(connect(**options), accepted[-1])
        switching.result()
    assert len(accepted) > 1
    found = Inbox(connect(), MAIL).receive(len(accepted))
    assert sorted(found, key=accepted.index) == accepted


@pytest.mark.crash
@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_the_thread_of_leases_and_the_loop_find_the_master(
    group: Group, ledger: Ledger, tmp_path: Path, pool: str
) -> None:
    """They are two system threads, and a socket that one opens cannot be used by the other."""
    options = {**group.options, "delayed_lease_seconds": 1.0}
    setup = Settings(f"delayed+{group.url}", None, options, str(ledger.path))
    worker = Worker(setup, tmp_path, pool=pool, concurrency=2)

    def run_some() -> None:
        ledger.wait_for_all([app.send_task("record", countdown=n % 2 / 5).id for n in range(10)])

    with worker, make_app(setup) as app:
        run_some()
        for _ in range(10):
            with group.client() as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "normal")
            time.sleep(0.5)
        run_some()
        old = group.kill_master()
        group.wait_for_failover(old)
        run_some()
        assert worker.running
    assert not worker.mixed_threads()


@pytest.mark.crash
@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
@pytest.mark.parametrize("is_planned", [False, True])
def test_a_greenlet_that_does_not_yield_runs_once(
    group: Group, ledger: Ledger, tmp_path: Path, pool: str, is_planned: bool
) -> None:
    """Its worker's greenlets learn of the failover when it is over."""
    options = {**group.options, "delayed_replicas_to_wait": 1, "delayed_lease_seconds": 5.0}
    setup = Settings(f"delayed+{group.url}", None, options, str(ledger.path))
    worker = Worker(setup, tmp_path, pool=pool, concurrency=2, queues=["celery", "own"])
    rival = Worker(setup, tmp_path, name="w2", pool="threads", queues=["other"], gossip=True)
    with worker, rival, make_app(setup) as app:
        busy = app.send_task("busy", (BUSY_SECONDS, "python")).id
        ledger.wait_for(1)
        app.control.add_consumer("celery", destination=[rival.name], reply=True, timeout=30)
        if is_planned:
            group.switch()
        else:
            group.wait_for_failover(group.kill_master())
        ledger.wait(lambda _: len(ledger.of(busy)) > 1, "it has ended")
        wait_until(lambda: has_replica(group), "the new master has a replica", 60)
        ledger.wait_for_all([app.send_task("record", queue="own").id])
    assert [entry["phase"] for entry in ledger.of(busy)] == ["start", "end"]


def has_replica(group: Group) -> bool:
    with suppress(redis.RedisError), group.client() as client:
        return bool(client.wait(1, 100))
    return False


def subscribers(group: Group) -> int:
    count = 0
    for sentinel in group.sentinels:
        with sentinel.client() as client:
            listening = {each["cmd"] for each in client.client_list()} & {"psubscribe", "ping"}
            count += bool(listening)
    return count


def test_a_sentinel_that_comes_back_is_heard(
    group: Group, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentinel_watch, "PING_SECONDS", 0.1)
    publish(connect(), "x")
    wait_until(lambda: subscribers(group) == 3, "all Sentinels are listened to")
    group.sentinels[0].stop()
    group.sentinels[0].start()
    wait_until(lambda: subscribers(group) == 3, "all Sentinels are listened to again")


@pytest.mark.parametrize("rule", ["+psubscribe", "&*"])
def test_a_user_that_cannot_listen_is_told_of_once(
    group: Group,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rule: str,
) -> None:
    monkeypatch.setattr(sentinel_watch, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(sentinel_watch, "_watches", {})  # as in a new process
    with ExitStack() as stack:
        clients = [stack.enter_context(each.client()) for each in group.sentinels]
        for client in clients:
            rules = ("resetchannels", "+sentinel", "+client", rule)
            client.execute_command("ACL", "SETUSER", "deaf", "reset", "on", ">x", *rules)
            client.execute_command("ACL", "LOG", "RESET")
        connection = connect(sentinel_kwargs={"username": "deaf", "password": "x"})
        publish(connection, "x")
        wait_until(lambda: all(_denied(each) > 3 for each in clients), "all were tried again")
        connection.release()
        warnings = [each for each in caplog.records if each.levelname == "WARNING"]
        (text,) = [
            each.getMessage() for each in warnings if "Cannot subscribe" in each.getMessage()
        ]
        assert "needs +subscribe +psubscribe +ping &*" in text
        assert text.count("127.0.0.1:") == 3
        for client in clients:
            client.execute_command("ACL", "DELUSER", "deaf")


def _denied(client: redis.Redis) -> int:
    log: Any = client.acl_log()
    return sum(int(each["count"]) for each in log if each["username"] == "deaf")


def test_threads_end_with_the_last_connection(
    group: Group, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentinel_watch, "PING_SECONDS", 0.1)
    own = {**group.options["sentinel_kwargs"], "socket_timeout": 2}  # none of other tests listens
    first, second = connect(sentinel_kwargs=own), connect(sentinel_kwargs=own)
    publish(first, "x")
    publish(second, "x")
    watch = first.default_channel.pool.sentinel_manager.watch
    assert watch is second.default_channel.pool.sentinel_manager.watch
    assert len(watch._listening) == 3
    first.release()
    second.release()
    wait_until(lambda: not watch._listening, "nobody listens")
    publish(second, "x")
    assert len(watch._listening) == 3
