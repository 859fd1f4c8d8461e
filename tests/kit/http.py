"""The HTTP API in a thread of this process, on a free port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from celery import Celery

from celery_ext.http import Api, HttpOptions
from celery_ext.http.serving.server import make_server
from tests.kit.wait import wait_until


def make_app(url: str, **config: Any) -> Celery:
    """An app with two tasks that do nothing."""
    app = Celery("shop", broker=f"delayed+{url}", set_as_current=False)
    app.conf.update(config)
    for name in ("till.send_mail", "till.charge"):
        app.task(_nothing, name=name, shared=False)
    app.task(_strict, name="till.strict", shared=False)
    return app


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _strict(one: int) -> None: ...


@contextmanager
def serving(api: Any) -> Iterator[str]:
    """Run a server and give its URL; at the end it is shut down as by a signal."""
    server = make_server(api, "127.0.0.1", 0)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive(), "the server has started")
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@contextmanager
def api_client(app: Celery, *, needs_token: bool = False, **options: Any) -> Iterator[httpx.Client]:
    api = Api(app, HttpOptions.parse(options), needs_token=needs_token)
    with serving(api) as url, httpx.Client(base_url=url, timeout=15) as client:
        client.api = api  # type: ignore[attr-defined]
        yield client
