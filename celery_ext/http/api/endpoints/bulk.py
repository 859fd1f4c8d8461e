"""Many tasks as NDJSON: creates them with an answer for each line, and exports delayed ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from celery_ext.errors import BROKER_FAILS
from celery_ext.http.problems import Problem, busy, refused

from ..models import Filter, Search
from ..operations import Call, Operations, encode, parsed, validated
from ..task_models import NewTaskWithId
from .event_stream import Streamed
from .lists.search import page_of
from .tasks import Row, created, new_id, row_of

MEDIA_TYPE = "application/x-ndjson"

#: How many lines are read and sent together.
LINES = 1_000

#: How many such batches there are at a time: one is read while Redis stores another.
UNDER_WAY = 2

#: How many times as long as a request the answer may be: it is kept until all has been read.
ANSWER_SHARE = 2

#: How many tasks one step of an export has. A line with the cursor follows each step.
STEP = 1_000

#: How long an export waits before it tries again to get one of its token's threads.
WAIT_SECONDS = 0.1

operations = Operations("tasks")


@operations.add(
    "POST",
    "/v1/bulk",
    "schedule",
    None,
    body=NewTaskWithId,
    body_type=MEDIA_TYPE,
    read=None,
    answer_type=MEDIA_TYPE,
    problems=(413, 415),
)
async def create_tasks(call: Call) -> Response:
    """Create many tasks: one JSON object per line. The answer has one line for each, in order."""
    kind = call.request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (MEDIA_TYPE, "application/ndjson", "application/jsonl"):
        raise Problem(415, f"the content type must be {MEDIA_TYPE}")
    # Sent when all has been read: a client that sends everything before it reads would otherwise
    # wait for ever.
    answers: list[bytes] = []
    number = accepted = size = 0
    is_too_long = False
    under_way: deque[asyncio.Task[tuple[bytes, int]]] = deque()
    limit = ANSWER_SHARE * call.service.options.bulk_bytes

    async def settle(left: int) -> None:
        nonlocal accepted, size
        while len(under_way) > left:
            found, count = await under_way.popleft()
            answers.append(found)
            accepted += count
            size += len(found)

    try:
        async for lines in _lines(call.request, call.service.options.body_bytes):
            is_too_long = is_too_long or (size > limit and any(map(bytes.strip, lines)))
            if is_too_long:
                continue  # a client that sends all before it reads must see the answer
            under_way.append(asyncio.create_task(_deal_with(call, lines, number)))
            number += len(lines)
            await settle(UNDER_WAY - 1)
        await settle(0)
        if is_too_long:
            answers.append(_cut_off(number + 1))
    finally:
        await asyncio.gather(*under_way, return_exceptions=True)
        call.note("bulk-create", f"{accepted} of {number}")
    headers = {"Delayed-Accepted": str(accepted), "Delayed-Lines": str(number)}
    return Response(b"".join(answers), 200, headers, media_type=MEDIA_TYPE)


def _cut_off(number: int) -> bytes:
    problem = Problem(
        413, "the answer is too long: this line and those after it were not processed"
    )
    return (encode({"line": number, "problem": problem.as_dict()}) + "\n").encode()


async def _lines(request: Request, line_bytes: int) -> AsyncIterator[list[bytes]]:
    """The lines in bounded lists; the last line needs no line feed."""
    rest, waiting = b"", []
    async for part in request.stream():
        *whole, rest = (rest + part).split(b"\n")
        if len(rest) > line_bytes:
            raise Problem(413, f"a line is longer than {line_bytes} bytes")
        waiting += whole
        while len(waiting) >= LINES:
            yield waiting[:LINES]
            del waiting[:LINES]
    yield [*waiting, *([rest] if rest.strip() else [])]


async def _deal_with(call: Call, lines: list[bytes], start: int) -> tuple[bytes, int]:
    """The answers to some lines, and how many tasks were accepted."""
    answers, rows, places = await call.run(_read, call, lines, start)
    problems: dict[int, Problem] = {}
    if rows:
        try:
            refusals = await call.service.writer.send(rows)
            problems = {n: refused(reason) for n, reason in refusals.items()}
        except Problem as problem:
            problems = dict.fromkeys(range(len(rows)), problem)
    for n, each in problems.items():
        number = answers[places[n]]["line"]
        answers[places[n]] = {"line": number, "problem": each.as_dict()}
    text = "".join(encode(answer) + "\n" for answer in answers)
    return text.encode(), len(rows) - len(problems)


def _read(
    call: Call, lines: list[bytes], start: int
) -> tuple[list[dict[str, Any]], list[Row], list[int]]:
    """The answers if all are accepted, the rows to send, and the index of each row's answer."""
    answers: list[dict[str, Any]] = []
    rows: list[Row] = []
    places: list[int] = []
    for number, line in enumerate(lines, start + 1):
        if not line.strip():
            continue
        try:
            new = validated(NewTaskWithId, parsed(line))
            id, due = new.id or new_id(), new.due_at
            rows.append(row_of(call, new, id, due))
        except Problem as problem:
            answers.append({"line": number, "problem": problem.as_dict()})
            continue
        places.append(len(answers))
        answers.append({"line": number, **created(id, due)})
    return answers, rows, places


@operations.add(
    "GET", "/v1/bulk", "read", None, query=Filter, answer_type=MEDIA_TYPE, problems=(503,)
)
async def export_tasks(call: Call) -> Response:
    """Export delayed tasks: one JSON object per line, with cursor lines; a null cursor ends it."""
    given, streams = call.query, call.service.streams
    streams.begin(call.identity)
    try:
        first = await _page(call, given, given.cursor)
    except BaseException:
        streams.end(call.identity)
        raise
    return Streamed(call, _exported(call, given, first), media_type=MEDIA_TYPE)


async def _page(call: Call, given: Filter, cursor: str | None) -> dict[str, Any]:
    """Read a page, as soon as the searches of this token leave enough threads to others."""
    search = Search(**given.criteria, limit=STEP, cursor=cursor)
    while True:
        try:
            with call.service.searches.place(call.identity):
                return await call.run(page_of, call, search)
        except Problem as problem:
            if problem.status_code != 429 or not await call.service.pause(WAIT_SECONDS):
                raise
            await call.check()
            if await call.request.is_disconnected():
                raise


async def _exported(call: Call, given: Filter, page: dict[str, Any]) -> AsyncIterator[str]:
    """A line for each task, and one with the cursor after each step; null: there are no more."""
    while True:
        cursor = page["next"]
        lines = [*page["tasks"], {"cursor": cursor}]
        yield "".join(encode(line) + "\n" for line in lines)
        if cursor is None or call.service.closing:
            return
        try:
            await call.check()
            page = await _page(call, given, cursor)
        except (*BROKER_FAILS, Problem) as error:
            problem = error if isinstance(error, Problem) else busy("the broker failed", 503, 5)
            yield encode({"cursor": cursor, "problem": problem.as_dict()}) + "\n"
            return
