"""The HTTP dialect of "Later", a delay queue with callbacks: /create, /delete, /query."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from celery_ext.errors import BulkError

from ..api import create_once
from ..api.endpoints.tasks import broker_failed, new_id, refused, row_of
from ..api.models import NewTask
from ..api.operations import Call, Json, Operation, parsed, validated
from ..api.status import delayed_infos, message_of
from ..callbacks.jobs import is_job, job_of
from ..problems import Problem


class _Given(BaseModel):
    """Its clients may send more than is read."""

    model_config = ConfigDict(extra="ignore")


class LaterTask(_Given):
    """A job; `delay` is in seconds."""

    topic: str = Field(min_length=1, max_length=300)
    delay: int = Field(0, ge=0, le=30_000_000_000)
    retry: int = Field(0, ge=0, le=30)
    callback: str = Field(min_length=1, max_length=2_000)
    content: str = ""


class LaterId(_Given):
    """Which job is meant."""

    id: str = Field(min_length=1, max_length=300)


class LaterState(BaseModel):
    """A job; times are in seconds since the epoch. The name `creat_time` is the dialect's."""

    id: str
    topic: str
    execute_time: int
    max_retry: int
    has_retry: int
    callback: str
    content: Any
    creat_time: int


async def _body(call: Call, model: type[BaseModel]) -> Any:
    # Its clients name all sorts of content types, or none.
    try:
        return validated(model, parsed(await call.request.body()))
    except Problem as problem:
        raise _as_400(problem) from None


def _as_400(problem: Problem) -> Problem:
    """The dialect knows 400 for what is wrong with a request."""
    status = 400 if problem.status_code in (409, 422) else problem.status_code
    return Problem(status, problem.detail, errors=problem.errors, headers=problem.headers)


async def later_create(call: Call) -> Response:
    given: LaterTask = await _body(call, LaterTask)
    id = new_id()
    call.note("create", id)
    try:
        new = validated(NewTask, given.model_dump())
        row = row_of(call, new, id, new.due_at)
        if refusals := await call.service.writer.send([row]):
            raise refused(refusals[0])
    except Problem as problem:
        raise _as_400(problem) from None
    except BulkError as error:
        raise broker_failed(error) from error
    return Json({"id": id})


async def later_delete(call: Call) -> Response:
    given: LaterId = await _body(call, LaterId)
    call.note("delete", given.id)
    if not await call.run(_delete, call, given.id):
        raise Problem(404, "there is no such task, or it is not delayed any more")
    return Json({})


def _delete(call: Call, id: str) -> bool:
    delayed = call.service.delayed
    dropped = []
    for shard, infos in delayed_infos(call.service, call.identity, id).items():
        dropped += delayed.drop(shard, [info for info in infos if is_job(info)])
    for info in dropped:
        create_once.forget(delayed.store, info)
    return bool(dropped)


async def later_query(call: Call) -> Response:
    given: LaterId = await _body(call, LaterId)
    found = await call.run(_query, call, given.id)
    if found is None:
        raise Problem(404, "there is no such task")
    return Json(found)


def _query(call: Call, id: str) -> dict[str, Any] | None:
    info = message_of(call.service, call.identity, id)
    if info is None or not is_job(info):
        return None
    job = job_of(call.service.app, info)
    created = int(job.get("created") or 0)
    return {
        "id": info.id,
        "topic": str(job.get("topic") or ""),
        "execute_time": created if info.due_ms is None else -(-info.due_ms // 1000),
        "max_retry": int(job.get("retry") or 0),
        "has_retry": int(info.headers.get("retries") or 0),
        "callback": str(job.get("callback") or ""),
        "content": job.get("content"),
        "creat_time": created,
    }


class LaterCreated(BaseModel):
    """The id of a job that Redis has."""

    id: str


def _operation(path: str, handler: Any, scope: str, summary: str, **more: Any) -> Operation:
    return Operation(
        "POST", path, handler, scope, summary, "Later", is_raw=True, problems=(404,), **more
    )


OPERATIONS = [
    _operation(
        "/create",
        later_create,
        "schedule",
        "Create a job.",
        body=LaterTask,
        answers={200: LaterCreated},
    ),
    _operation(
        "/delete", later_delete, "schedule", "Cancel a job.", body=LaterId, answers={200: None}
    ),
    _operation(
        "/query",
        later_query,
        "read",
        "A job that has not ended.",
        body=LaterId,
        answers={200: LaterState},
    ),
]
