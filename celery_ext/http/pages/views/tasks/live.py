"""The live part of a page, as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator

from starlette.responses import Response

from celery_ext.errors import BROKER_FAILS
from celery_ext.http.api.endpoints.event_stream import BEAT_SECONDS, Streamed
from celery_ext.http.problems import Problem

from ...visit import View, Visit


def stream(visit: Visit, view: View) -> Response:
    """Stream the live part of a page. Raises a Problem if too many streams are open."""
    visit.service.streams.begin(visit.identity)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Streamed(visit, _looks(visit, view), headers=headers, media_type="text/event-stream")


async def _looks(visit: Visit, view: View) -> AsyncIterator[str]:
    yield "retry: 2000\n\n"
    said_at, before = time.monotonic(), ""
    while await visit.service.pause(view.seconds):
        text = await _look(visit, view)
        if text is None:
            return
        now = time.monotonic()
        if text != before or now - said_at > BEAT_SECONDS:
            said_at, before = now, text
            yield text


async def _look(visit: Visit, view: View) -> str | None:
    """The next event; None: the login has ended."""
    try:
        await visit.check()
        html = await visit.run(_part, visit, view)
    except (Problem, *BROKER_FAILS) as error:
        if isinstance(error, Problem) and error.status_code == 401:
            return None
        detail = error.detail if isinstance(error, Problem) else "Redis does not answer"
        return f"event: trouble\ndata: {json.dumps(detail)}\n\n"
    return f"event: look\ndata: {json.dumps(html)}\n\n"


def _part(visit: Visit, view: View) -> str:
    shown = {"view": view, **view.look(visit)}
    return visit.pages.make_live(visit, f"{view.name}.html", shown)
