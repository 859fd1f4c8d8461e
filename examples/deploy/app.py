"""The app that the files of this folder run: workers, Beat and the HTTP server."""

from __future__ import annotations

import os

from celery import Celery

import celery_ext

app = Celery("app", broker=os.environ.get("BROKER_URL", "delayed+redis://localhost:6379/0"))
app.conf.update(
    # Wait for Redis at the start.
    broker_connection_retry_on_startup=True,
    # A task of a killed worker runs again. None may run for longer than a worker has to end.
    task_acks_late=True,
    task_time_limit=300,
    # For Prometheus and for probes. The HTTP server reports on queues, so workers need not.
    delayed_metrics={"host": "0.0.0.0", "port": 9540, "backlog": False},
    beat_schedule={"hello": {"task": "app.remind", "schedule": 3600, "args": ("Beat",)}},
)
celery_ext.install(app)


@app.task
def remind(name: str) -> None:
    print(f"{name}, it is time")
