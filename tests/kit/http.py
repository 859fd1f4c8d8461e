"""The HTTP API in a thread of this process, on a free port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from celery import Celery

from celery_ext import Delayed
from celery_ext.http import Api, HttpOptions
from celery_ext.http.auth.tokens import Tokens
from celery_ext.http.serving.server import make_server
from kombu_delayed.message.envelope import open_envelope
from tests.kit.wait import wait_until

#: Starts an API with options.
Serve = Callable[..., httpx.Client]


def make_app(url: str, **config: Any) -> Celery:
    """An app with two tasks that do nothing."""
    app = Celery("shop", broker=f"delayed+{url}", set_as_current=False)
    app.conf.update({"delayed_expectations": {}, **config})
    for name in ("till.send_mail", "till.charge"):
        app.task(_nothing, name=name, shared=False)
    app.task(_strict, name="till.strict", shared=False)
    return app


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _strict(one: int) -> None: ...


@contextmanager
def serving(api: Any) -> Iterator[str]:
    """Run a server and yield its URL; at the end it is shut down as if by a signal."""
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
    api = Api(app, HttpOptions.parse({"callbacks": True, **options}), needs_token=needs_token)
    with serving(api) as url, httpx.Client(base_url=url, timeout=15) as client:
        client.api = api  # type: ignore[attr-defined]
        yield client


def bearer(delayed: Delayed, *scopes: str, **bounds: Any) -> dict[str, str]:
    """The header with a new token."""
    return {"Authorization": f"Bearer {Tokens(delayed).create('test', scopes, **bounds)[1]}"}


def pages(api: httpx.Client, path: str, name: str, **query: Any) -> list[list[Any]]:
    """The contents of each page of a list, up to the last one."""
    found = []
    while True:
        answer = api.get(path, params=query)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()[name])
        query["cursor"] = answer.json()["next"]
        if query["cursor"] is None:
            return found


def all_rows(api: httpx.Client, path: str, name: str, **query: Any) -> list[Any]:
    """The contents of all pages of a list together."""
    return [row for page in pages(api, path, name, **query) for row in page]


def bury(delayed: Delayed, queue: str = "celery", reason: str = "no") -> list[str]:
    """Make dead letters of all ready messages of a queue, in its order; returns their ids."""
    declared = delayed.store.policies.read(queue).version
    found = delayed.store.deliver(queue, "w:1:x", 99, 1, lease_ms=60_000, declared=declared)
    assert found is not None
    texts = [delayed.store.readable(queue, record[1:]) for record in found.records]
    ids = [open_envelope(text, 0).id for text in texts]
    letters = [(tag, id, reason, b"") for tag, id in enumerate(ids, 1)]
    delayed.store.bury(queue, "w:1:x", letters, "")
    return ids
