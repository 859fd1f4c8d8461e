"""Lifecycle events as they happen: server-sent events."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import anyio
from starlette.responses import Response, StreamingResponse

from celery_ext.errors import BROKER_FAILS
from celery_ext.http.problems import Problem
from celery_ext.tasks.times import from_ms
from kombu_delayed.inspection import events as streams
from kombu_delayed.inspection.events import Event

from ...service.feed import Listener, Positions, next_of
from ..models import EventQuery
from ..operations import Call, Operations

#: A resumed stream repeats the events of this time before its end: one may have been added to a
#: stream of Redis when another stream had just been read, and the clocks of nodes may differ.
REPEATED_MS = 2_000

#: How often access is checked again, and how often a stream without events sends a comment.
CHECK_SECONDS, BEAT_SECONDS = 1.0, 15.0

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
    query: EventQuery = call.query
    shards = partial(call.service.shards, call.identity, query.queue)
    listener = Listener((call.identity, query.queue), shards, partial(_is_wanted, call, query))
    call.service.streams.begin(call.identity)
    try:
        positions = await call.run(call.service.feed.join, listener)
    except BaseException:
        call.service.feed.leave(listener)
        call.service.streams.end(call.identity)
        raise
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    lines = _events(call, listener, positions, after)
    answer = Streamed(call, lines, headers=headers, media_type="text/event-stream")
    answer.at_end = partial(call.service.feed.leave, listener)
    return answer


class _NotReadError(Exception):
    """The client does not read."""


class Streamed(StreamingResponse):
    """Frees its place among the streams however it ends, even if the client does not read."""

    #: Called when it has ended, even if it never began.
    at_end: Callable[[], None] = staticmethod(lambda: None)

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
        except Problem as problem:  # its request has a body that is too large, or does not arrive
            logger.info("A stream has ended: %s", problem.detail)
        finally:
            self._service.streams.end(self._identity)
            self.at_end()


def _before(stream_id: str) -> str:
    """The stream id to continue after. Raises a Problem if the given one is invalid."""
    found = _STREAM_ID.fullmatch(stream_id)
    if found is None:
        raise Problem.of_field("Last-Event-ID", "it is not one of an event", 400)
    return f"{max(int(found[1]) - REPEATED_MS, 0)}-{2**64 - 1}"


async def _events(
    call: Call, listener: Listener, positions: Positions, after: str | None
) -> AsyncIterator[str]:
    yield ": events follow\n\n"
    with _ending():
        if after is not None:
            missed = streams.merged(
                call.service.delayed.store, dict.fromkeys(positions, after), positions
            )
            while found := await call.run(next_of, missed):
                await call.check()
                if call.service.closing:
                    return
                if text := "".join(_text(event) for event in found if listener.accepts(event)):
                    yield text
        said_at = time.monotonic()
        while not (call.service.closing or listener.is_behind):
            events = await listener.next(CHECK_SECONDS)
            await call.check()
            now = time.monotonic()
            if events or now - said_at > BEAT_SECONDS:
                said_at = now
                yield "".join(map(_text, events)) or ": \n\n"


@contextmanager
def _ending() -> Iterator[None]:
    """A stream ends if access to it does, or if Redis fails."""
    try:
        yield
    except Problem as problem:
        logger.info("A stream has ended: %s", problem.detail)
    except BROKER_FAILS as error:
        logger.warning("A stream has ended: %s", error)


def _is_wanted(call: Call, query: EventQuery, event: Event) -> bool:
    return (
        query.task_id in (None, event.id)
        and query.event in (None, event.event)
        and call.identity.sees(event.queue, event.tenant or None)
    )


@lru_cache(maxsize=4_096)  # there may be many listeners
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
