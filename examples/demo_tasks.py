"""The demo's task: an ordinary Celery app. The broker URL alone decides where its tasks wait."""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery
from celery.signals import worker_ready

TASK_SECONDS = 0.1
LEASE_SECONDS = 2


def create_app(broker_url: str) -> Celery:
    """An app on a broker: the stock transport passes over the `delayed_` option."""
    app = Celery("demo", broker=broker_url, set_as_current=False)
    app.conf.update(
        task_acks_late=True,
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"delayed_lease_seconds": LEASE_SECONDS},
    )

    @app.task(name="remind", shared=False)
    def remind(number: int) -> None:
        note("start", number)
        time.sleep(TASK_SECONDS)
        note("end", number)

    return app


def note(event: str, number: int = 0) -> None:
    """Append a line to this worker's ledger: one write, which a kill leaves out or completes."""
    ledger = os.open(os.environ["DEMO_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(ledger, f"{event} {number} {time.time():.6f}\n".encode())
    finally:
        os.close(ledger)


@worker_ready.connect
def _ready(**_: object) -> None:
    note("ready")


if "DEMO_BROKER" in os.environ:  # in a worker
    app = create_app(os.environ["DEMO_BROKER"])


def read_ledger(path: Path) -> list[tuple[str, int, float]]:
    """The whole lines of a ledger, as (event, number, time)."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [(event, int(number), float(at)) for event, number, at in map(str.split, lines)]
