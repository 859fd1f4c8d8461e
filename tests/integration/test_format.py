"""A process that finds data of a newer format stops and says what to upgrade."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection

from kombu_delayed.connection import format
from kombu_delayed.errors import UNREACHABLE, FormatError
from kombu_delayed.inspection.doctor import examine_format, upgrade
from kombu_delayed.store.keys import format_version
from kombu_delayed.store.store import Store
from kombu_delayed.transport.server_checks import numbers_of
from tests.kit.backlog import check_backlog
from tests.kit.clusters import Cluster
from tests.kit.inbox import Connect
from tests.kit.ledger import Ledger
from tests.kit.mail import MAIL
from tests.kit.servers import Server
from tests.kit.state import entry
from tests.kit.tasks_app import Settings, make_app
from tests.kit.workers import ROOT, Worker

pytestmark = pytest.mark.thorough

KEY = format_version()
SENTENCE = r"format 3\.0, and this version of kombu-delayed knows formats up to 2: upgrade"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make processes check the format at every call."""
    monkeypatch.setattr("kombu_delayed.connection.connection.FORMAT_SECONDS", 0)
    monkeypatch.setattr("kombu_delayed.connection.cluster.connection.FORMAT_SECONDS", 0)


@pytest.fixture(autouse=True)
def _unknown_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr("kombu_delayed.transport.server_checks._partition_sizes", {})


def publish(connection: Connection) -> None:
    connection.Producer().publish("x", exchange=MAIL.exchange, routing_key="mail", declare=[MAIL])


@pytest.mark.parametrize(
    ("found", "is_known"),
    [
        *((each, True) for each in (b"2.0", b"2.7", b"1.0", b"0.9")),
        *((each, False) for each in (b"3.0", b"10.1", b"2", b"one", b"", b"\xff")),
    ],
)
def test_versions(found: bytes, is_known: bool) -> None:
    refused = pytest.raises(FormatError, match="upgrade kombu-delayed")
    with nullcontext() if is_known else refused:
        format.check(found)


@pytest.mark.parametrize(
    ("keys", "version"),
    [
        (["{mail}:partitions"], b"1.0"),
        (["{mail}:messages", "{mail}:events"], b"1.0"),
        (["{mail}:dead"], b"1.0"),
        (["{mail}:consumers", "{other}:wake"], b"1.0"),
        (["{mail}:consumers", "{mail}:messages", "{mail}:messages:buckets"], b"2.0"),
        (["_kombu.binding.mail", "mail", "unacked", "unacked_index", "mail:messages"], b"2.0"),
        (["shop:{mail}:messages", "{mail}:events"], b"2.0"),
    ],
)
def test_a_database_that_is_in_use_has_the_format_of_its_first_release(
    keys: list[str], version: bytes, connect: Connect, client: redis.Redis
) -> None:
    """Processes of 0.1.0, which write no version, would not find what they look for."""
    for key in keys:
        client.hset(key, "field", "value")
    connect().default_channel.store.size("other")
    assert client.get(KEY) == version


@pytest.mark.usefixtures("impatient")
def test_a_version_that_was_deleted_is_written_again(connect: Connect, client: redis.Redis) -> None:
    connection = connect()
    publish(connection)
    client.zadd("{mail}:consumers", {"w": 1})
    client.delete(KEY)
    publish(connection)
    assert client.get(KEY) == b"2.0"


@pytest.mark.parametrize(("prefix", "other"), [("", "shop:"), ("shop:", "")])
def test_each_prefix_has_its_own_version(
    connect: Connect, client: redis.Redis, prefix: str, other: str
) -> None:
    """The first process writes it, and no process of another one connects."""
    client.set(format_version(other), "3.0")
    publish(connect(global_keyprefix=prefix))
    assert client.get(format_version(prefix)) == b"2.0"
    assert client.ttl(format_version(prefix)) == -1
    with pytest.raises(FormatError, match=SENTENCE) as refused:
        publish(connect(global_keyprefix=other))
    assert not isinstance(refused.value, UNREACHABLE), "it is not tried again"
    assert not client.exists(f"{other}mail")


@pytest.mark.usefixtures("impatient")
def test_a_process_that_runs_finds_out_by_itself(connect: Connect, client: redis.Redis) -> None:
    connection = connect()
    publish(connection)
    client.set(KEY, "3.0")
    for _ in range(2):
        with pytest.raises(FormatError, match=SENTENCE):
            publish(connection)
    assert client.llen("mail") == 1
    client.set(KEY, "2.0")
    publish(connection)


def large_in_format_1(connect: Connect, client: redis.Redis, *queues: str) -> Store:
    """A store of the format of the release before, with queues that need many buckets."""
    client.set(KEY, "1.0")
    connection = connect()
    publish(connection)
    store: Store = connection.default_channel.store
    store.bucket_bytes = 1000
    for queue in queues:
        store.schedule(queue, [entry(f"m{n}", "+600000") for n in range(1, 500)])
    return store


def test_an_older_format_stays_until_it_is_raised(
    connect: Connect, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise processes of the older release would stop."""
    store = large_in_format_1(connect, client, "mail")
    assert store.format.major == 1
    assert client.hlen("{mail}:messages") == 499
    (finding,) = [examine_format(store)]
    assert finding is not None
    assert "doctor --upgrade" in finding.examples[0]
    monkeypatch.setattr(format, "MAJOR", 1)  # as in the release before
    format.check(client.get(KEY) or b"")
    monkeypatch.undo()
    assert [upgrade(store, ["mail"]) for _ in range(2)] == [True, False]
    assert examine_format(store) is None
    assert client.hlen("{mail}:messages") < 100
    assert len(check_backlog(client, "mail")) == 499
    monkeypatch.setattr(format, "MAJOR", 1)
    with pytest.raises(FormatError, match="knows formats up to 1"):
        format.check(client.get(KEY) or b"")


def test_an_upgrade_that_was_killed_goes_on(
    connect: Connect, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = large_in_format_1(connect, client, "mail", "other")
    ask, left = store.ask, [1]

    def killed(*args: Any, **given: Any) -> Any:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return ask(*args, **given)

    monkeypatch.setattr(store, "ask", killed)
    with pytest.raises(KeyboardInterrupt):
        upgrade(store, ["mail", "other"])
    monkeypatch.undo()
    assert not upgrade(store, ["mail", "other"])
    for queue in ("mail", "other"):
        assert client.hlen(f"{{{queue}}}:messages") < 100
        assert len(check_backlog(client, queue)) == 499


def test_a_user_who_may_not_write_it_reads_it(server: Server, client: redis.Redis) -> None:
    if numbers_of(client.info("server")["redis_version"]) < (7, 0):
        rules = ["~*", "-set"]
    else:  # a user with all commands except this one is refused
        rules = [f"%R~{KEY}", "~mail*", "~{mail}:*", "~_kombu*", "~kombu-delayed-shards"]
    client.execute_command("ACL", "SETUSER", "reader", "on", ">any", "+@all", "&*", *rules)
    try:
        client.set(KEY, "3.0")
        with as_user(server, "reader") as connection:
            with pytest.raises(FormatError, match=SENTENCE):
                connection.connect()
            client.delete(KEY)
            publish(connection)
        assert not client.exists(KEY)
    finally:
        client.acl_deluser("reader")


def test_a_user_who_may_not_read_it_is_told_once(
    server: Server, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ["mail*", "{mail}:*", "_kombu*", "kombu-delayed-shards"]
    client.acl_setuser("blind", True, passwords=["+any"], commands=["+@all"], keys=keys)
    try:
        with as_user(server, "blind") as connection:
            publish(connection)
            connection.default_channel.store.run.pool.disconnect()
            publish(connection)
        (warning,) = [each for each in caplog.messages if "may not read" in each]
        assert f"~{KEY}" in warning
        client.set(KEY, "99.0")
        client.execute_command("ACL", "SETUSER", "blind", f"~{KEY}", "-get")
        not_read = pytest.raises(FormatError, match=f"may not read the key '{KEY}'")
        with as_user(server, "blind") as connection, not_read:
            upgrade(connection.default_channel.store, ["mail"])
        assert client.get(KEY) == b"99.0"
    finally:
        client.acl_deluser("blind")


@contextmanager
def as_user(server: Server, user: str) -> Iterator[Connection]:
    with Connection(f"delayed+redis://{user}:any@127.0.0.1:{server.port}/0") as connection:
        yield connection


@pytest.mark.usefixtures("impatient")
def test_on_a_cluster(connect_cluster: Connect, cluster: Cluster) -> None:
    connection = connect_cluster()
    publish(connection)
    with cluster.routed() as client:
        assert client.get(KEY) == b"2.0"
        client.set(KEY, "3.0")
        for refused in (connect_cluster().connect, lambda: publish(connection)):
            with pytest.raises(FormatError, match=SENTENCE):
                refused()
        assert client.llen("{mail}") == 1


@pytest.fixture
def settings(server: Server, tmp_path: Path) -> Settings:
    options = {"delayed_lease_seconds": 2.0}
    return Settings(f"delayed+{server.url}", None, options, str(tmp_path / "ledger"))


def test_a_worker_does_not_start(settings: Settings, client: redis.Redis, tmp_path: Path) -> None:
    client.set(KEY, "3.0")
    worker = Worker(settings, tmp_path)
    worker.start(wait=False)
    assert worker.wait() != 0
    assert "upgrade kombu-delayed in this process" in worker.log


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_running_worker_stops_when_it_reconnects(
    settings: Settings, client: redis.Redis, tmp_path: Path, pool: str
) -> None:
    with make_app(settings) as app:
        worker = Worker(settings, tmp_path, pool=pool, concurrency=2)
        worker.start()
        try:
            done = app.send_task("record").id
            Ledger(Path(settings.ledger)).wait_for_all([done])
            later = app.send_task("record", countdown=1).id
            client.set(KEY, "3.0")
            client.client_kill_filter(_type="normal", skipme=True)
            assert worker.wait() != 0
            assert "upgrade kombu-delayed in this process" in worker.log
        finally:
            worker.kill()
    assert client.hexists("{celery}:messages", later)
    assert later not in Ledger(Path(settings.ledger)).ids()


@pytest.mark.parametrize(
    "command",
    [
        "celery -A tests.kit.installed_app delayed count",
        "kombu_delayed.migrate to-delayed {url}",
    ],
)
def test_commands(settings: Settings, client: redis.Redis, server: Server, command: str) -> None:
    client.set(KEY, "3.0")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings.environment()}
    whole = [sys.executable, "-m", *command.format(url=server.url).split()]
    found = subprocess.run(whole, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode != 0
    assert "upgrade kombu-delayed in this process" in found.stderr + found.stdout
    assert "Traceback" not in found.stderr
