"""Exports all delayed tasks that match a search as NDJSON, while they are read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from celery_ext.errors import BROKER_FAILS
from celery_ext.http.problems import Problem, busy

from ...models import Filter, Search
from ...operations import Call, Operations, encode
from ..bulk import MEDIA_TYPE
from ..event_stream import Streamed
from .search import page_of

#: How many tasks one step has. A line with the cursor follows each step.
STEP = 1_000

operations = Operations("tasks")


@operations.add(
    "GET", "/v1/bulk", "read", None, query=Filter, answer_type=MEDIA_TYPE, problems=(503,)
)
async def export_tasks(call: Call) -> Response:
    """Export delayed tasks: one JSON object per line, with cursor lines; a null cursor ends it."""
    given: Filter = call.query
    first = await call.run(page_of, call, _search(given, given.cursor))
    call.service.streams.begin(call.identity)
    return Streamed(call, _lines(call, given, first), media_type=MEDIA_TYPE)


def _search(given: Filter, cursor: str | None) -> Search:
    return Search(**{**given.model_dump(), "limit": STEP, "cursor": cursor})


async def _lines(call: Call, given: Filter, page: dict[str, Any]) -> AsyncIterator[str]:
    """A line for each task, and one with the cursor after each step; null: there are no more."""
    while True:
        cursor = page["next"]
        lines = [*page["tasks"], {"cursor": cursor}]
        yield "".join(encode(line) + "\n" for line in lines)
        if cursor is None or call.service.closing:
            return
        try:
            await call.check()
            page = await call.run(page_of, call, _search(given, cursor))
        except (*BROKER_FAILS, Problem) as error:
            problem = error if isinstance(error, Problem) else busy("the broker failed", 503, 5)
            yield encode({"cursor": cursor, "problem": problem.as_dict()}) + "\n"
            return
