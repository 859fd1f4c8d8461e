"""The extended app, for workers and commands in tests."""

from __future__ import annotations

from celery_ext import install
from tests.kit.tasks_app import Settings, make_app

app = make_app(Settings.from_environment())
install(app)


@app.task(name="revoke_from_task")
def revoke_from_task(task_id: str) -> None:
    app.control.revoke(task_id)
