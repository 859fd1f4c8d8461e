"""Fixtures of tests that talk to a server: one real process per kind, empty for each test."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
from celery import Celery, _state

import celery_ext
from kombu_delayed.consumer.lease import keeper
from kombu_delayed.store.store import Store
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.workers import heed_signals, last_words

if TYPE_CHECKING:
    from celery_ext import Delayed  # loaded when a test needs it


def pytest_configure() -> None:
    heed_signals()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Eventlet does not exist for Python 3.14 and later."""
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    if "eventlet" in map(str, given) and not find_spec("eventlet"):
        pytest.skip("eventlet is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Failed tests show the logs of their workers."""
    report = yield
    if report.failed and call.when == "call":
        report.sections += [(f"log of {name}", text) for name, text in last_words()]
    return report


@pytest.fixture(scope="session", params=available_kinds())
def shared_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server for the whole session; use `server`, which is empty."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    with start_server(request.param, directory, port=0) as server:
        yield server


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A worker that a test starts in this process sets the level for all later tests."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)


@pytest.fixture(autouse=True, scope="module")
def _shared_tasks() -> Iterator[None]:
    """Celery gives a shared task to all later apps; here, only to those of the same module."""
    shared = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.intersection_update(shared)


@pytest.fixture
def server(shared_server: Server) -> Server:
    """A real server without any keys."""
    _forget_leases(shared_server)
    with shared_server.client() as client:
        client.flushall()
    return shared_server


def _forget_leases(server: Server) -> None:
    """A lease of a connection that a test has left open would come back after the flush."""
    address = {server.port, str(server.socket_path)} - {None}
    for (_, at), each in tuple(keeper._keepers.items()):
        if isinstance(at, tuple) and address.intersection(at):
            for lease in tuple(each._leases):
                each.forget(lease)


@pytest.fixture
def client(server: Server) -> Iterator[redis.Redis]:
    with ExitStack() as stack:
        yield stack.enter_context(server.client())


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server for this test alone, which keeps its data: it may be restarted and killed."""
    kind, config = available_kinds()[0], {"appendfsync": "always"}
    directory = tmp_path / "server"
    with start_server(kind, directory, port=0, append_only=True, config=config) as server:
        yield server


@pytest.fixture
def store(client: redis.Redis) -> Store:
    """A store on the server's clock; a test sets `store.now` to move it."""
    return Store(client)


@pytest.fixture
def delayed(app: Celery) -> Iterator[Delayed]:
    """The backlog of the fixture `app`."""
    with closing(celery_ext.Delayed(app)) as delayed:
        yield delayed


@pytest.fixture
def no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread renews leases, so that it sends no commands of its own at unexpected times."""
    monkeypatch.setattr(keeper.Keeper, "watch", lambda keeper, lease: None)
