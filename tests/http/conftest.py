from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
import redis
from celery import Celery

from tests.kit.http import Serve, api_client, make_app
from tests.kit.pages import Visitor
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.shop import OpenShop, make_shop


@pytest.fixture
def app(server: Server) -> Iterator[Celery]:
    with make_app(server.url) as app:
        yield app


@pytest.fixture
def serve(app: Celery) -> Iterator[Serve]:
    """Start an API with options; several may run at once."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(api_client(app, **options))


@pytest.fixture(scope="session")
def shared_api(shared_server: Server) -> Iterator[httpx.Client]:
    """One API for the whole session, with default options and no need of a token."""
    with make_app(shared_server.url) as app, api_client(app) as api:
        yield api


@pytest.fixture
def api(server: Server, shared_api: httpx.Client) -> httpx.Client:
    shared_api.api.service.forget_names()  # type: ignore[attr-defined]
    return shared_api


@pytest.fixture
def visitor(api: httpx.Client) -> Iterator[Visitor]:
    """A browser that runs no scripts."""
    api.api.service.cache.forget()  # type: ignore[attr-defined]
    with Visitor(api) as made:
        yield made


@pytest.fixture(scope="module")
def open_shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenShop]:
    """Open a shop with a server of its own; gives its app, a client of Redis and a visitor."""
    with ExitStack() as stack:

        def make() -> tuple[Celery, redis.Redis, Visitor]:
            kind, directory = available_kinds()[0], tmp_path_factory.mktemp("shop")
            server = stack.enter_context(start_server(kind, directory, port=0))
            app = stack.enter_context(make_shop(server.url))
            api = stack.enter_context(api_client(app))
            client = stack.enter_context(server.client())
            return app, client, stack.enter_context(Visitor(api))

        yield make


@pytest.fixture(scope="session")
def shared_locked_api(shared_server: Server) -> Iterator[httpx.Client]:
    """Like `shared_api`, but a token is needed."""
    with make_app(shared_server.url) as app, api_client(app, needs_token=True) as api:
        yield api


@pytest.fixture
def locked_api(server: Server, shared_locked_api: httpx.Client) -> httpx.Client:
    shared_locked_api.api.service.forget_names()  # type: ignore[attr-defined]
    return shared_locked_api
