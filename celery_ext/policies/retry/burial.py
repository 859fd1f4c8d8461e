"""Buries a task that is running, from the process that runs it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from celery.app.task import Task
from celery.utils.log import get_logger

from celery_ext.app.broker import own_broker
from celery_ext.app.capture import Capture
from celery_ext.tasks import failures
from celery_ext.tasks.failures import Failure
from kombu_delayed.message import clock
from kombu_delayed.message.envelope import UNTIL_HEADER, to_json
from kombu_delayed.message.wait import Wait

from .strategies import FIRST_HEADER, GIVE_UP_HEADER, QUEUE_HEADER, STRATEGY_HEADER

logger = get_logger(__name__)

#: Headers that a task which starts from scratch does not have.
BEGUN_HEADERS = {
    *(failures.HEADER, FIRST_HEADER, GIVE_UP_HEADER, QUEUE_HEADER, STRATEGY_HEADER),
    "redelivered",
}

#: Headers that a dead letter does not have: a channel sends it at once, and a replay does not claim
#: its key again.
UNIQUE_HEADERS = ("delayed_unique", "delayed_conflict", UNTIL_HEADER)


def bury(task: Task, reason: str, history: Sequence[Failure]) -> bool:
    """Make a dead letter of the running task. A replay starts from scratch.

    Returns whether it has become one.

    The task may be acked or not. If it is not, and this process dies before it is, it is delivered
    again although it is dead.
    """
    request = task.request
    headers = {
        name: value for name, value in (request.headers or {}).items() if name not in BEGUN_HEADERS
    } | dict.fromkeys(UNIQUE_HEADERS)  # None, as the task's own class may add them
    broker = own_broker(task.app)
    try:
        signature = task.signature_from_request(request, retries=0, headers=headers, eta=None)
        channel = broker.connection.default_channel
        store = broker.store
        for verb, given in Capture(task.app, channel).of(signature.apply_async):
            if verb in ("put", "schedule"):
                queue, entry, _ = given
                home = store.shards.home(queue, entry.id)
                payload = json.loads(entry.message)
                for name in UNIQUE_HEADERS:
                    payload["headers"].pop(name, None)
                text = Wait(clock.now_ms(), reason).put_into(to_json(payload))
                record = entry.record[0] + text
                consumer = f"{request.hostname}:{os.getpid()}:"
                letter = 0, entry.id, reason, record.encode()
                store.bury(home, consumer, [letter], failures.write(history))
                return True
        logger.error("Task %s[%s] has failed and cannot be buried", task.name, request.id)
    except Exception:  # the task's own error is raised after this
        logger.exception("Task %s[%s] has failed and cannot be buried", task.name, request.id)
    return False
