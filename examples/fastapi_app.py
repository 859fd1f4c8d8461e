"""Reminders with FastAPI: scheduled, shown and cancelled over HTTP.

uvicorn fastapi_app:app
celery -A fastapi_app:celery worker
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import celery_ext

celery = Celery(
    "fastapi_app", broker=os.environ.get("BROKER_URL", "delayed+redis://localhost:6379/0")
)
delayed = celery_ext.install(celery)
app = FastAPI()


class Reminder(BaseModel):
    user_id: int
    seconds: float = 3600


@celery.task
def remind(user_id: int) -> None:
    print(f"user {user_id}: you have something in your basket")


# FastAPI runs plain functions in threads: one that waits for Redis holds up no other request.


@app.post("/reminders", status_code=202)
def schedule(wanted: Reminder) -> dict[str, str]:
    result = remind.apply_async((wanted.user_id,), countdown=wanted.seconds)
    return {"id": result.id}


@app.get("/reminders/{task_id}")
def show(task_id: str) -> dict[str, Any]:
    info = delayed.get(task_id)
    if info is None:
        raise HTTPException(404, "nothing is known of this reminder")
    return info.as_dict()


@app.delete("/reminders/{task_id}", status_code=204)
def cancel(task_id: str) -> None:
    if not delayed.cancel(task_id):
        raise HTTPException(404, "this reminder is neither delayed nor ready")
