"""Flower: its pages and its API, with a worker."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from urllib.error import HTTPError

from common import (
    REDIS,
    check,
    empty,
    free_port,
    get,
    main,
    new_app,
    ready,
    running,
    wait_until,
    worker,
)

app = new_app("flower_monitor", worker_send_task_events=True, task_send_sent_event=True)


@app.task
def add(x: int, y: int) -> int:
    return x + y


def flower(stack: ExitStack, *options: str) -> str:
    """The URL of a Flower that runs until the end of the stack."""
    port = free_port()
    command = (sys.executable, "-m", "celery", "-A", "flower_monitor", *options)
    stack.enter_context(
        running(
            *command,
            "flower",
            f"--port={port}",
            until="Connected to",
            FLOWER_UNAUTHENTICATED_API="true",
        )
    )
    return f"http://127.0.0.1:{port}"


def shows(flower_url: str, id: str) -> bool:
    """Whether Flower shows a task as done."""
    try:
        return '"SUCCESS"' in get(f"{flower_url}/api/task/info/{id}")
    except HTTPError:  # it does not know the task yet
        return False


if __name__ == "__main__":
    stack = ExitStack()
    url = flower(stack)
    plain = flower(stack, "-b", REDIS)
    stack.enter_context(worker("flower_monitor", "-E"))

    @check("lists workers")
    def workers() -> None:
        wait_until(lambda: "celery@" in get(f"{url}/api/workers?refresh=1"), "a worker is listed")

    @check("sends a task, and shows its result")
    def sends() -> None:
        body = json.dumps({"args": [2, 3]}).encode()
        answer = json.loads(get(f"{url}/api/task/async-apply/flower_monitor.add", body))
        assert app.AsyncResult(answer["task-id"]).get(timeout=30) == 5
        wait_until(lambda: shows(url, answer["task-id"]), "the task is shown as done")

    @check("shows a delayed task once it is due")
    def delayed() -> None:
        began = time.monotonic()
        result = add.apply_async((1, 1), countdown=2)
        assert result.get(timeout=30) == 2
        assert time.monotonic() - began >= 1.9
        wait_until(lambda: shows(url, result.id), "it is shown")

    @check("the Broker tab")
    def broker() -> None:
        assert "celery" in get(f"{url}/broker")

    @check("workers, tasks and the Broker tab of `celery -b redis://… flower`")
    def broker_of_plain() -> None:
        assert "celery" in get(f"{plain}/broker")
        wait_until(lambda: "celery@" in get(f"{plain}/api/workers?refresh=1"), "a worker is listed")
        result = add.delay(4, 4)
        wait_until(lambda: shows(plain, result.id), "it is shown")

    @check("queue lengths")
    def lengths() -> None:
        app.control.cancel_consumer("celery", reply=True, timeout=10)
        for _ in range(3):
            add.delay(1, 1)
        wait_until(lambda: ready(app) == 3, "three are ready")
        found = json.loads(get(f"{url}/api/queues/length"))["active_queues"]
        assert {"name": "celery", "messages": 3} in found, found

    @check("queue lengths of `celery -b redis://… flower`")
    def lengths_of_plain() -> None:
        found = json.loads(get(f"{plain}/api/queues/length"))["active_queues"]
        assert {"name": "celery", "messages": ready(app)} in found, found

    with stack:
        main()
        empty(app)
