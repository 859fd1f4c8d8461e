"""Reminders with Flask: scheduled, shown and cancelled over HTTP.

flask --app flask_app run
celery -A flask_app:celery worker
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from flask import Flask, abort, request

import celery_ext

celery = Celery(
    "flask_app", broker=os.environ.get("BROKER_URL", "delayed+redis://localhost:6379/0")
)
delayed = celery_ext.install(celery)
app = Flask(__name__)


@celery.task
def remind(user_id: int) -> None:
    print(f"user {user_id}: you have something in your basket")


@app.post("/reminders")
def schedule() -> Any:
    wanted = request.get_json()
    result = remind.apply_async((wanted["user_id"],), countdown=wanted["seconds"])
    return {"id": result.id}, 202


@app.get("/reminders/<task_id>")
def show(task_id: str) -> Any:
    info = delayed.get(task_id)
    if info is None:
        abort(404, "nothing is known of this reminder")
    return info.as_dict()


@app.delete("/reminders/<task_id>")
def cancel(task_id: str) -> Any:
    return "", 204 if delayed.cancel(task_id) else 404
