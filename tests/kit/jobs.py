"""HTTP jobs with everything they need: the API, a receiver and a real worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from celery_ext import Delayed
from tests.kit.http import api_client
from tests.kit.receiver import Receiver, receiving
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

OPTIONS = {
    "callbacks": True,
    "callback_allow": ["127.0.0.1:*"],
    "callback_secrets": ["s3cret"],
    "callback_seconds": 5,
    "callback_per_host": 2,
    "callback_share": 0.5,
}


@dataclass
class Jobs:
    api: httpx.Client
    receiver: Receiver
    delayed: Delayed
    worker: Worker

    def send(self, path: str, **more: Any) -> str:
        given = {"topic": "order", "callback": self.receiver.url(path), "content": "hello", **more}
        answer = self.api.post("/v1/tasks", json=given)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def state(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"/v1/tasks/{id}").json()
        return found

    def remaining(self, id: str) -> float:
        info = self.delayed.get(id)
        assert info is not None
        assert info.remaining is not None
        return info.remaining.total_seconds()

    def wait(self, id: str, status: str, retries: int | None = None) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            found = self.state(id)
            as_wanted = found.get("status") == status and retries in (None, found.get("retries"))
            return found if as_wanted else None

        return wait_until(reached, f"{id} is {status}")  # type: ignore[return-value]


@contextmanager
def run_jobs(
    server: Server,
    directory: Path,
    pool: str = "threads",
    concurrency: int = 4,
    *,
    keeps: bool = False,
    app_config: Mapping[str, Any] | None = None,
    **more: Any,
) -> Iterator[Jobs]:
    """Start them with an empty server; `more` are options of `delayed_http`.

    `keeps`: the receiver keeps connections open.
    """
    with server.client() as client:
        client.flushall()
    config = {**OPTIONS, **more}
    settings = Settings(
        f"delayed+{server.url}", config={"delayed_http": config, **(app_config or {})}
    )
    with ExitStack() as stack:
        app = stack.enter_context(make_app(settings))
        receiver = stack.enter_context(receiving(keeps=keeps))
        options = ["--prefetch-multiplier", "1"]
        worker = Worker(settings, directory, pool=pool, concurrency=concurrency, options=options)
        stack.enter_context(worker)
        api = stack.enter_context(api_client(app, **config))
        delayed = Delayed(app)
        stack.callback(delayed.close)
        yield Jobs(api, receiver, delayed, worker)
