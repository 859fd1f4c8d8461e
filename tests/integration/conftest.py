"""Connections and queues for the tests of this folder."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection, Exchange, Queue

from tests.kit.cli import HOUR, Cli, cli_on
from tests.kit.clusters import Cluster, start_cluster
from tests.kit.extended import Bench, extended
from tests.kit.ledger import Ledger
from tests.kit.policed import OpenApp, apps_on
from tests.kit.proxy import Proxy
from tests.kit.sentinels import Group, start_group
from tests.kit.servers import Server, available_kinds


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect garbage while the server is there: Celery's results contact it when collected.

    Surviving objects are not scanned again before the last test of a module: scanning all objects
    of pytest and the test modules would take half a second after each test.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[..., Connection]]:
    """Open connections that are closed at the end; keyword arguments are transport options."""
    with ExitStack() as stack:

        def open_connection(**options: Any) -> Connection:
            connection = Connection(f"delayed+{server.url}", transport_options=options)
            return stack.enter_context(connection)

        yield open_connection


@pytest.fixture
def connection(connect: Callable[..., Connection]) -> Connection:
    return connect()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """The way to the server, which can be cut."""
    assert server.port is not None
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def open_app(server: Server) -> Iterator[OpenApp]:
    with apps_on(server) as open_app:
        yield open_app


@pytest.fixture
def bench(server: Server, tmp_path: Path) -> Iterator[Bench]:
    """An installed app with results, and a ledger of what its workers run."""
    with extended(server, tmp_path) as bench:
        yield bench


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def mail() -> Queue:
    return Queue("mail", Exchange("mail", type="direct"), routing_key="mail")


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One Cluster for the whole session; use `cluster`, which is empty and healthy."""
    with start_cluster(available_kinds()[0], tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """Three masters without a key, and a replica of each, all healthy."""
    shared_cluster.heal()
    shared_cluster.flush()
    return shared_cluster


@pytest.fixture
def names(cluster: Cluster) -> list[str]:
    """Three queues of the Cluster, each on a different node."""
    return cluster.queues_apart()


@pytest.fixture
def connect_cluster(cluster: Cluster) -> Iterator[Callable[..., Connection]]:
    """As `connect`, to the Cluster; `url` is another URL."""
    with ExitStack() as stack:

        def open_connection(url: str = cluster.url, **options: Any) -> Connection:
            return stack.enter_context(Connection(f"delayed+{url}", transport_options=options))

        yield open_connection


@pytest.fixture(scope="module")
def shared_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One master with Sentinels for a file; use `group`, which is empty and healthy."""
    with start_group(available_kinds()[0], tmp_path_factory.mktemp("sentinel")) as group:
        yield group


@pytest.fixture
def group(shared_group: Group) -> Group:
    """A master without a key, two replicas and three Sentinels, all healthy."""
    shared_group.heal()
    with shared_group.client() as client:
        client.flushall()
        client.wait(2, 1000)
    return shared_group


@pytest.fixture
def connect_group(group: Group) -> Iterator[Callable[..., Connection]]:
    """As `connect`, to the group; `url` is another URL."""
    with ExitStack() as stack:

        def open_connection(url: str = group.url, **options: Any) -> Connection:
            options = {**group.options, **options}
            return stack.enter_context(Connection(f"delayed+{url}", transport_options=options))

        yield open_connection


@pytest.fixture
def empty(server: Server, client: redis.Redis) -> Iterator[Cli]:
    """The command line of an app without tasks."""
    with cli_on(server, client) as cli:
        yield cli


@pytest.fixture
def cli(empty: Cli) -> Cli:
    """Four tasks in two queues."""
    acme = {"tenant": "acme"}
    empty.send("one", 1 * HOUR, args=("[bold]x",), kwargs={"to": "ann"})
    empty.send("two", 2 * HOUR, queue="mail", headers={**acme, "colour": "red"})
    empty.send("three", 3 * HOUR, name="billing.charge")
    empty.send("four", 40 * HOUR, queue="mail", name="billing.charge", headers=acme, group_id="g1")
    return empty
