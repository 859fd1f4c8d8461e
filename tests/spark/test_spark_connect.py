"""One connection for each broker and thread, and another one after an error."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from kombu.exceptions import OperationalError
from pyspark import TaskContext
from pyspark.sql.types import StructType

from celery_ext.spark import connect
from celery_ext.spark.backup.held import HeldReader
from celery_ext.spark.backup.transfer import counting
from celery_ext.spark.connect import connected
from celery_ext.spark.events.archive_lock import ArchiveLock
from celery_ext.spark.options import BrokerOptions, ReadOptions, WriteOptions
from celery_ext.spark.sink.write import BacklogWriter
from celery_ext.spark.source.reader import BacklogReader
from kombu_delayed.errors import OptionError
from tests.kit.servers import Server, available_kinds, free_port, start_server

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(connect, "_kept", {})
    yield
    for delayed in connect._kept.values():
        delayed.close()


@pytest.fixture
def options(server: Server) -> BrokerOptions:
    return BrokerOptions.parse({"broker": f"delayed+{server.url}"})


def ping(options: BrokerOptions) -> None:
    with connected(options) as delayed:
        assert delayed.store.run("PING")


def test_it_is_reused(options: BrokerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(options) as one:
        assert one.store.run("PING")
    with connected(options) as again:
        assert again is one
    other = BrokerOptions.parse({"broker": options.url, "transport_options": {"db": 1}})
    with connected(other) as another:
        assert another is not one
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with connected(options) as of_a_fork:
        assert of_a_fork is not one


def test_another_one_after_an_error(options: BrokerOptions) -> None:
    with pytest.raises(ZeroDivisionError), connected(options) as one:
        _ = 1 / 0
    with connected(options) as other:
        assert other is not one

    def read() -> Iterator[int]:
        with connected(options):
            yield 1

    next(reader := read())
    reader.close()
    with connected(options) as still:
        assert still is other


def test_an_error_in_another_thread_closes_nothing(options: BrokerOptions) -> None:
    def fail() -> None:
        with suppress(ZeroDivisionError), connected(options) as delayed:
            assert delayed.store.run("PING")
            _ = 1 / 0

    with connected(options) as delayed:
        before = delayed.store.run("CLIENT", "ID")
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        assert delayed.store.run("CLIENT", "ID") == before


def test_a_broker_that_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start_server(available_kinds()[0], tmp_path, port=0) as server:
        options = BrokerOptions.parse({"broker": f"delayed+{server.url}"})
        ping(options)
        server.kill()
        with pytest.raises(OperationalError):
            ping(options)
        server.start()
        ping(options)
        server.kill()
        with pytest.raises(OperationalError):
            ping(options)
        # A task waits for it.
        monkeypatch.setattr(TaskContext, "get", lambda: SimpleNamespace(attemptNumber=lambda: 0))
        later = threading.Timer(1.5, server.start)
        later.start()
        ping(options)
        later.join()


def test_a_job_that_begins_waits_for_its_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if sum(waits) > 10 and not server.running:
            server.start()

    def away() -> None:
        waits.clear()
        server.kill()

    monkeypatch.setattr("kombu.utils.functional.sleep", sleep)
    monkeypatch.setattr(connect, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(connect, "monotonic", lambda: sum(waits))
    rows = StructType().add("id", "string").add("task", "string").add("eta", "string")
    with start_server(available_kinds()[0], tmp_path, port=0) as server:
        given = {"broker": f"delayed+{server.url}", "queues": "q", "job_id": "j"}
        read = {name: given[name] for name in ("broker", "queues")}
        away()
        BacklogWriter(WriteOptions.parse(given), rows)
        away()
        assert BacklogReader(ReadOptions.parse(read), StructType()).partitions() == []
        away()
        assert len(HeldReader(ReadOptions.parse(read)).partitions()) == 1
        away()
        ArchiveLock(BrokerOptions.parse({"broker": given["broker"]}), "path").free()
        away()
        with counting(["q"], broker=given["broker"], job_id="j") as count:
            assert count() >= 0


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that a task that runs again has waited, without waiting."""
    waits: list[float] = []
    monkeypatch.setattr(TaskContext, "get", lambda: SimpleNamespace(attemptNumber=lambda: 1))
    monkeypatch.setattr(connect, "time", SimpleNamespace(sleep=waits.append))
    monkeypatch.setattr("kombu.utils.functional.sleep", waits.append)
    monkeypatch.setattr(connect, "monotonic", lambda: sum(waits))
    return waits


@pytest.mark.parametrize("is_reused", [False, True])
def test_nobody_waits_for_another_password(
    tmp_path: Path, slept: list[float], *, is_reused: bool
) -> None:
    with start_server(available_kinds()[0], tmp_path, port=0) as server:
        options = BrokerOptions.parse({"broker": f"delayed+{server.url}"})
        if is_reused:
            ping(options)
        with server.client() as client:
            client.config_set("requirepass", "other")
            client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(OperationalError, match="Authentication required"):
            ping(options)
    assert not slept


def test_a_broker_that_does_not_come_back_is_waited_for_once(slept: list[float]) -> None:
    options = BrokerOptions.parse({"broker": f"delayed+redis://127.0.0.1:{free_port()}/0"})
    with pytest.raises(OperationalError):
        ping(options)
    assert 25 <= sum(slept) < 35


def test_a_write_waits_for_replicas(
    options: BrokerOptions,
    client: redis.Redis,
    slept: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a failover, the new master may have no replica for some seconds."""

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) > 10:
            client.config_set("min-replicas-to-write", 0)

    client.config_set("min-replicas-to-write", 1)
    try:
        ping(options)
        assert not slept
        monkeypatch.setattr(connect, "time", SimpleNamespace(sleep=sleep))
        with connected(WriteOptions.parse({"broker": options.url})) as delayed:
            assert delayed.store.run("SET", "key", "value")
        assert 10 < sum(slept) < 11
    finally:
        client.config_set("min-replicas-to-write", 0)


def test_the_broker_is_the_one_that_was_named(
    options: BrokerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "delayed+redis://127.0.0.1:1/0")
    ping(options)


def test_an_app(options: BrokerOptions) -> None:
    given = BrokerOptions.parse({"app": "tests.kit.tasks_app:app"})
    with connected(given) as delayed:
        assert delayed.app.main == "tests"
    with (
        pytest.raises(OptionError, match=r"option app='no.such:app' cannot be imported: "),
        connected(BrokerOptions.parse({"app": "no.such:app"})),
    ):
        pass
