"""The HTTP dialect of "Later", a delay queue with callbacks: /create, /delete, /query."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field
from starlette.requests import Request

from celery_ext.control.changes.ready import ReadyTask

from ..api.endpoints.tasks import new_id, row_of
from ..api.operations import Call, Operations, read_any, validated
from ..api.ready import ready_of
from ..api.status import delayed_infos, message_of
from ..api.task_models import NewTask
from ..callbacks.jobs import is_job, job_of
from ..problems import Problem, busy
from .given import NO_TRUTH, Given

#: The most that the `int` of Later has on any machine. Less than 0 means none, as in Later.
MOST_RETRIES = 2**31 - 1


class LaterTask(Given):
    """A job; `delay` is in seconds. Unknown fields are ignored."""

    topic: str = Field(min_length=1, max_length=300)
    delay: Annotated[int, Field(ge=0, le=30_000_000_000), NO_TRUTH] = 0
    retry: Annotated[int, Field(ge=-MOST_RETRIES, le=MOST_RETRIES), NO_TRUTH] = 0
    callback: str = Field(min_length=1, max_length=2_000)
    content: str = ""


class LaterId(Given):
    """The id of a job."""

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


class LaterCreated(BaseModel):
    """The id of a stored job."""

    id: str


class LaterDeleted(BaseModel):
    """An empty object."""


async def _read(request: Request, model: type[BaseModel]) -> Any:
    try:
        return await read_any(request, model)
    except Problem as problem:
        raise _as_400(problem) from None


def _as_400(problem: Problem) -> Problem:
    """Turn a problem of a request into a 400, the status that the dialect has for it."""
    status = 400 if problem.status_code in (409, 422) else problem.status_code
    return Problem(status, problem.detail, errors=problem.errors, headers=problem.headers)


operations = Operations("Later", read=_read, problems=(404,))


@operations.add("POST", "/create", "schedule", LaterCreated, body=LaterTask)
async def later_create(call: Call) -> dict[str, str]:
    """Create a job."""
    id = new_id()
    call.note("create", id)
    try:
        new = validated(NewTask, call.body.model_dump(exclude={"retry"}))
        row = row_of(call, new, id, new.due_at, by_status=False)
        row[2]["retry"] = max(call.body.retry, 0)
        await call.service.writer.send_one(row)
    except Problem as problem:
        raise _as_400(problem) from None
    return {"id": id}


@operations.add("POST", "/delete", "schedule", LaterDeleted, body=LaterId)
def later_delete(call: Call) -> dict[str, str]:
    """Cancel a job that is delayed or ready."""
    moves, id = call.service.moves, call.body.id
    call.note("delete", id)
    dropped = []
    for shard, infos in delayed_infos(call.service, call.identity, id).items():
        dropped += moves.cancel(shard, [info for info in infos if is_job(info)])
    for task in () if dropped else _ready(call, id):
        dropped += moves.cancel_ready([task])
    if not dropped:
        raise Problem(404, "there is no such task, or a worker has it")
    return {}


def _ready(call: Call, id: str) -> list[ReadyTask]:
    try:
        return [task for task in ready_of(call.service, call.identity, [id]) if is_job(task.info)]
    except Problem as problem:  # too many are ready to look for one
        raise busy(problem.detail) from None


@operations.add("POST", "/query", "read", LaterState, body=LaterId)
def later_query(call: Call) -> dict[str, Any]:
    """A job that has not ended."""
    info = message_of(call.service, call.identity, call.body.id)
    if info is None or not is_job(info):
        raise Problem(404, "there is no such task")
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
