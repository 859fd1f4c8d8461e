"""The pytest plugin: fixtures for a broker, its clock, a Celery app on it, and a worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from celery import Celery

    from kombu_delayed.testing import Broker, Clock

# Every pytest run imports this module, so it imports only pytest and the standard library; the
# functions import everything else. The fixtures for Kombu alone are here as well, because
# kombu_delayed itself imports Kombu.

APP = "delayed_celery_app"

START_SECONDS = 30

#: URL schemes of result backends that would keep results on the app's own server.
RESULTS = ("redis", "rediss", "redis+socket", "sentinel")

#: Settings for the server of such results that would not fit the tests' server.
RESULT_SETTINGS = (
    "redis_backend_use_ssl",
    "redis_backend_credential_provider",
    "redis_username",
    "redis_password",
    "redis_socket_keepalive",
)

#: Parts of a broker's URL that would apply to the tests' server.
BROKER_PARTS = ("broker_host", "broker_port", "broker_user", "broker_password", "broker_vhost")

#: Environment variables that would override the broker of the app's configuration.
VARIABLES = (
    "CELERY_BROKER_URL",
    "CELERY_BROKER_READ_URL",
    "CELERY_BROKER_WRITE_URL",
    "TEST_BROKER",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option to pytest's configuration that names the app as in `celery --app`."""
    parser.addini(APP, "the Celery app for delayed_worker, such as shop.celery:app", default="")


@pytest.fixture(scope="session")
def delayed_broker_url() -> Iterator[str]:
    """URL of a broker of its own for this test session; use `delayed_broker` for an empty one."""
    from kombu_delayed.testing.session import session_server

    with session_server() as directory:
        yield f"delayed+embedded://{directory}"


@pytest.fixture
def delayed_broker(delayed_broker_url: str) -> Iterator[Broker]:
    """The session's broker, without any message."""
    from kombu_delayed.testing import Broker

    broker = Broker(delayed_broker_url)
    broker.empty()
    yield broker
    broker.empty()
    broker.close()


@pytest.fixture
def delayed_clock(delayed_broker: Broker) -> Iterator[Clock]:
    """The clock by which messages of `delayed_broker` fall due: `advance(days=3)`."""
    from kombu_delayed.testing import Clock

    clock = Clock(delayed_broker)
    yield clock
    clock.reset()


@pytest.fixture(scope="session")
def delayed_celery_app(pytestconfig: pytest.Config) -> Celery:
    """The app under test, from pytest's option of the same name. You can override this fixture."""
    name = pytestconfig.getini(APP)
    if not name:
        raise pytest.UsageError(
            f"which Celery app is it? Set {APP} = shop.celery:app in pytest's configuration, or "
            f"write a fixture {APP} that returns it"
        )
    from celery.app.utils import find_app

    return find_app(name)


@pytest.fixture
def delayed_app(
    delayed_celery_app: Celery, delayed_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Celery]:
    """The app under test on this test's broker, which also keeps the results of a Redis backend."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    app, url = delayed_celery_app, delayed_broker.url
    settings: dict[str, Any] = {
        "broker_url": url,
        "broker_read_url": url,
        "broker_write_url": url,
        **dict.fromkeys(BROKER_PARTS),
        "task_always_eager": False,
        "worker_hijack_root_logger": False,  # or pytest's caplog would capture nothing
    }
    if str(app.conf.result_backend).partition("://")[0] in RESULTS:
        monkeypatch.delenv("CELERY_RESULT_BACKEND", raising=False)
        settings |= {"result_backend": delayed_broker.result_url, **dict.fromkeys(RESULT_SETTINGS)}
    options = {**(app.conf.broker_transport_options or {})}
    if options.get("delayed_replicas_to_wait"):  # this server has none
        options["delayed_replicas_to_wait"] = 0
    settings["broker_transport_options"] = options  # a test may set others
    before = {name: app.conf.get(name) for name in settings}
    _disconnect(app)
    app.conf.update(settings)
    yield app
    _disconnect(app)
    app.conf.update(before)


def _disconnect(app: Celery) -> None:
    """Drop connections to another broker or its results, or to this one before it was emptied."""
    from kombu import pools

    if broker := sys.modules.get("celery_ext.app.broker"):
        broker.own_broker(app).close()
    _forget_results(app)
    app._backend_cache = None
    with suppress(AttributeError):
        del app._local.backend
    with suppress(AttributeError):
        app.delayed.close()
    pool, app._pool = app._pool, None
    if "amqp" in app.__dict__:
        app.amqp._producer_pool = None
    if pool is None:
        return
    for group in (pools.connections, pools.producers):
        for key, each in [*group.items()]:
            if getattr(each, "connections", each) is pool:
                group.pop(key)
    pool.force_close_all()


def _forget_results(app: Celery) -> None:
    """Let no result that a test leaves behind look for the server once that has ended."""
    backend = app._backend_cache or getattr(app._local, "backend", None)
    consumer: Any = getattr(backend, "result_consumer", None)
    if getattr(consumer, "_pubsub", None) is not None:
        consumer.stop()
        consumer._pubsub = None


@pytest.fixture
def delayed_worker_options() -> dict[str, Any]:
    """Options of `celery.contrib.testing.worker.start_worker`; override it to change them."""
    return {}


@pytest.fixture
def delayed_worker(
    delayed_app: Celery, delayed_broker: Broker, delayed_worker_options: dict[str, Any]
) -> Iterator[Any]:
    """A worker of the app under test, in a thread of this process; one task at a time."""
    from celery.contrib.testing import worker as contrib
    from celery.worker import state

    class Worker(contrib.TestWorkController):
        def ensure_started(self) -> None:
            if not self._on_started.wait(START_SECONDS):
                raise RuntimeError(
                    f"the worker has not started in {START_SECONDS} seconds: see its log above"
                )

    def activity() -> tuple[bool, int]:
        return bool(state.reserved_requests or state.active_requests), state.all_total_count[0]

    state.reset_state()  # left by an earlier worker in this process
    delayed_broker.watch(activity)
    options = {"perform_ping_check": False, "WorkController": Worker, **delayed_worker_options}
    with contrib.start_worker(delayed_app, **options) as worker:
        yield worker
