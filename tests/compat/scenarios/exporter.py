"""celery-exporter: its metrics of a worker, of tasks and of a queue."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial

from common import (
    REDIS,
    check,
    empty,
    free_port,
    get,
    main,
    new_app,
    running,
    wait_until,
    worker,
)

app = new_app("exporter", worker_send_task_events=True, task_send_sent_event=True)
PROGRAM = "import sys; from src.cli import cli; sys.exit(cli())"


@app.task
def add(x: int, y: int) -> int:
    return x + y


def exported(port: int, name: str, *labels: str) -> bool:
    """Whether a metric with these labels is above 0."""
    for line in get(f"http://127.0.0.1:{port}/metrics").splitlines():
        if line.startswith(f"{name}{{") and all(each in line for each in labels):
            return float(line.rpartition(" ")[2]) > 0
    return False


def metrics(port: int) -> None:
    add.delay(1, 1)
    add.apply_async((1, 2), countdown=2)
    seen = partial(exported, port)
    wait_until(lambda: seen("celery_worker_up"), "the worker is up")
    wait_until(lambda: seen("celery_task_succeeded_total", 'name="exporter.add"'), "a task is done")


def length(port: int) -> None:
    app.control.cancel_consumer("celery", reply=True, timeout=10)
    for _ in range(3):
        add.delay(1, 1)
    label = 'queue_name="celery"'
    wait_until(lambda: exported(port, "celery_queue_length", label), "the queue's length is there")
    app.control.add_consumer("celery", reply=True, timeout=10)


if __name__ == "__main__":
    stack = ExitStack()
    stack.enter_context(worker("exporter", "-E"))
    port = free_port()
    arguments = (f"--broker-url={REDIS}", f"--port={port}", "--host=127.0.0.1")
    stack.enter_context(
        running(os.environ["COMPAT_APART"], "-c", PROGRAM, *arguments, until="celery-exporter")
    )
    check("workers and tasks")(partial(metrics, port))
    check("queue length")(partial(length, port))

    with stack:
        main()
        empty(app)
