"""The body of a task's message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from celery import Celery
from kombu.serialization import prepare_accept_content
from kombu.transport.virtual import Channel, Message

from kombu_delayed.message import compressing

from ..errors import QueryError
from .task_info import TaskInfo

#: The headers that Celery gives every task.
CELERY_HEADERS = frozenset(
    {
        *("lang", "id", "shadow", "eta", "expires", "group", "group_index", "retries", "timelimit"),
        *("root_id", "parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result"),
        *("replaced_task_nesting", "stamped_headers", "stamps"),
    }
)


class _Decoder:
    """The parts of a channel that a message needs."""

    codecs = Channel.codecs
    decode_body = Channel.decode_body
    no_ack_consumers = None


Body = tuple[Any, Any, dict[str, Any]]


def payload_of(info: TaskInfo) -> dict[str, Any]:
    """The message of a task, for a change. Raises QueryError if it cannot be read."""
    try:
        payload: dict[str, Any] = json.loads(info.message)
    except ValueError:
        why = "it is not JSON"
        if compressing.MARK in info.message:
            why = "it is compressed with a dictionary that its queue has lost"
        raise QueryError(f"task {info.id} cannot be changed or moved: {why}") from None
    return payload


def read_body(app: Celery, info: TaskInfo) -> Body | None:
    """Arguments, keyword arguments, and what Celery embeds: callbacks, chain and chord.

    None if this process cannot read them: another serializer, or signed for others.
    """
    try:
        body = _message(app, info).payload
    except Exception:  # a serializer may raise anything
        return None
    if isinstance(body, Sequence) and len(body) == 3 and isinstance(body[2], dict):
        return body[0], body[1], body[2]
    return None


def raw_body(app: Celery, info: TaskInfo) -> bytes | str:
    """The body as its serializer has written it. Raises the error of Kombu if there is none."""
    body: bytes | str = _message(app, info).body
    return body


def _message(app: Celery, info: TaskInfo) -> Message:
    accept = prepare_accept_content(app.conf.accept_content)
    return Message(info.payload, _Decoder(), accept=accept)
