"""Lifecycle events as they happen: server-sent events."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
from starlette.responses import Response, StreamingResponse

from celery_ext.http.problems import Problem
from celery_ext.tasks.times import from_ms
from kombu_delayed.inspection import events as streams
from kombu_delayed.inspection.events import Event

from ..models import EventQuery
from ..operations import Call, Operations

#: How often the streams are looked at, the names of the queues, and how often nothing is said.
INTERVAL_SECONDS, NAMES_SECONDS, BEAT_SECONDS = 0.5, 30.0, 15.0

#: Events of one look; the next one goes on.
LOOK_SIZE = 500

logger = logging.getLogger(__name__)

_STREAM_ID = re.compile(r"(\d{1,15})-\d{1,20}")

operations = Operations("events")


@operations.add(
    "GET",
    "/v1/events",
    "read",
    None,
    query=EventQuery,
    answer_type="text/event-stream",
    problems=(503,),
)
async def stream_events(call: Call) -> Response:
    """Live lifecycle events. Last-Event-ID continues where a stream has ended."""
    last = call.request.headers.get("last-event-id")
    after = None if last is None else _before(last)
    positions = await call.run(_positions, call, after)
    call.service.streams.begin(call.identity)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Streamed(call, _events(call, positions), headers=headers, media_type="text/event-stream")


class _NotReadError(Exception):
    """Who has asked does not read."""


class Streamed(StreamingResponse):
    """Gives its place among the streams back, however it ends; who reads nothing loses it."""

    def __init__(self, call: Call, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._service, self._identity = call.service, call.identity

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        seconds = self._service.options.body_seconds

        async def send_in_time(message: Any) -> None:
            with anyio.move_on_after(seconds) as waited:
                await send(message)
            if waited.cancelled_caught:
                raise _NotReadError

        try:
            await super().__call__(scope, receive, send_in_time)
        except _NotReadError:
            logger.info("A stream has ended: nothing of it was read for %g s", seconds)
        finally:
            self._service.streams.end(self._identity)


def _before(stream_id: str) -> str:
    """Events of this millisecond are told again: those of other queues were perhaps not told."""
    found = _STREAM_ID.fullmatch(stream_id)
    if found is None:
        raise Problem.of_field("Last-Event-ID", "it is not one of an event", 400)
    return f"{max(int(found[1]) - 1, 0)}-{2**64 - 1}"


def _positions(call: Call, after: str | None) -> dict[str, str]:
    """Each stream that there is, and from where on to read it."""
    store = call.service.delayed.store
    shards = call.service.shards(call.identity, call.query.queue)
    if after is not None:
        return dict.fromkeys(shards, after)
    newest = {shard: streams.newest(store, shard) for shard in shards}
    return {shard: last[-1].stream_id if last else "0" for shard, last in newest.items()}


async def _events(call: Call, positions: dict[str, str]) -> AsyncIterator[str]:
    query: EventQuery = call.query
    named_at = said_at = time.monotonic()
    yield ": events follow\n\n"
    while await call.service.pause(INTERVAL_SECONDS):
        try:
            await call.check()
        except Problem:
            return
        now = time.monotonic()
        if now - named_at > NAMES_SECONDS:
            found = await call.run(_positions, call, "0")
            positions = {name: positions.get(name, start) for name, start in found.items()}
            named_at = now
        text = await call.run(_look, call, query, positions)
        if text or now - said_at > BEAT_SECONDS:
            said_at = now
            yield text or ": \n\n"


def _look(call: Call, query: EventQuery, positions: dict[str, str]) -> str:
    found: list[Event] = []
    for name, position in positions.items():
        page = streams.read(call.service.delayed.store, name, position, LOOK_SIZE)
        if page:
            positions[name] = page[-1].stream_id
            found += page
    found.sort(key=lambda event: event.at_ms)
    return "".join(_text(event) for event in found if _is_meant(call, query, event))


def _is_meant(call: Call, query: EventQuery, event: Event) -> bool:
    return (
        query.task_id in (None, event.id)
        and query.event in (None, event.event)
        and call.identity.sees(event.queue, event.tenant or None)
    )


def _text(event: Event) -> str:
    data = {
        "event": event.event,
        "at": from_ms(event.at_ms).isoformat(),
        "queue": event.queue,
        "id": event.id,
        "task": event.task,
        "tenant": event.tenant or None,
        "due": None if event.due_ms is None else from_ms(event.due_ms).isoformat(),
        "consumer": event.consumer or None,
        "deliveries": event.deliveries,
        "reason": event.reason or None,
    }
    return f"id: {event.stream_id}\nevent: {event.event}\ndata: {json.dumps(data)}\n\n"
