"""Messages of Celery tasks, as text."""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import Celery
from kombu import Connection
from kombu.serialization import dumps

from kombu_delayed.message.envelope import to_json

ID = "467c2c84-1fe0-4d2b-ae83-7923583af7b2"

app = Celery("shop")


def task(id: str = ID, /, priority: int = 0, serializer: str = "json", **given: Any) -> str:
    """The JSON of a task message, as Celery and Kombu make it."""
    given = {"args": ("x" * 300,), "kwargs": {}, "eta": "2026-11-25T03:27:21.235902+00:00", **given}
    reply_to = "b66589f9-1f5b-3e08-905d-fc994f90ff26"
    name = given.pop("name", "shop.tasks.send_email")
    made = app.amqp.as_task_v2(
        id, name, reply_to=reply_to, **{"argsrepr": None, "origin": "gen7@web-1", **given}
    )
    content_type, encoding, body = dumps(made.body, serializer)
    with Connection("memory://") as connection:
        channel = connection.channel()
        properties = {**made.properties, "delivery_mode": 2}
        payload = channel.prepare_message(
            body, priority, content_type, encoding, made.headers, properties
        )
        channel._inplace_augment_message(payload, "", "celery")
    return to_json(payload)


def damaged(dice: random.Random, id: str) -> str:
    """The text of a task with pieces missing, or doubled, at random; its start is unchanged."""
    text = task(id, args=("x" * dice.randrange(40),))
    for _ in range(dice.randrange(4)):
        at, length = dice.randrange(len(text)), dice.randrange(60)
        text = text[:at] + dice.choice(["", text[at : at + length] * 2]) + text[at + length :]
    return "{" + text[1:]


TASKS = {
    "as sent": {},
    "other argument lengths": {"args": (1,)},
    "more": {"args": ("xy", 7), "kwargs": {"a": [1, {"b": 'c"d'}]}},
    "in another zone": {"eta": datetime(2026, 11, 25, 3, tzinfo=timezone(timedelta(hours=2)))},
    "urgent": {"priority": 9},
    "no result": {"ignore_result": True},
    "whatever its task says": {"ignore_result": None},
    "tried again": {"retries": 3, "root_id": "another", "parent_id": "one more"},
    "in a group": {"group_id": "g-1", "group_index": 4, "root_id": "another"},
    "with limits": {"time_limit": 30, "soft_time_limit": 20, "expires": 600},
    "with a callback": {"callbacks": [{"task": "then", "args": [], "kwargs": {}, "options": {}}]},
    "stamped": {"stamped_headers": ["run"], "run": "7"},
    "with Unicode": {"args": ("äöü€😀",), "argsrepr": "('äöü€😀',)"},
    "a name to be escaped": {"name": 'shop."tasks"'},
    "quotes in its arguments": {"args": ('", "kwargsrepr": "', '"retries": 5')},
    "too large": {"args": ("x" * 100_000,)},
    "long readable arguments": {"args": (7,), "argsrepr": "x" * 70_000},
    "pickled": {"serializer": "pickle"},
}
