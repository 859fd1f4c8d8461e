"""The HTTP dialect of a distributed delayed job queue: /v1/delayedqueue, with a long poll."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.store.keys import http_topics

from ..api.endpoints.tasks import Row
from ..api.fields import Id, Name, Span, check_plain, span_of
from ..api.operations import Call, Json, Operations, parsed, read_any, validated
from ..api.status import delayed_infos, find, first_info
from ..callbacks.jobs import job_of
from ..problems import Problem
from . import long_poll

PATH = "/v1/delayedqueue"

#: What such a task is called in its message: nothing that a Celery worker runs.
PULL_TASK = "celery_ext.http.pull"

#: How often a long poll looks, and how long it waits at the most.
INTERVAL_SECONDS, LONGEST_WAIT = 0.25, timedelta(seconds=60)

operations = Operations("delayedqueue", PATH, read=read_any, problems=(404, 409, 422))


class _Given(BaseModel):
    """Its clients may send more than is read, and numbers for ids."""

    model_config = ConfigDict(coerce_numbers_to_str=True)


class QueuedPayload(_Given):
    """What a consumer is given; it subscribes to `topics`."""

    topics: Name = "default"
    callbackFuncName: Name
    args: list[Any] = Field(default_factory=list)

    @model_validator(mode="after")
    def _plain(self) -> QueuedPayload:
        check_plain(self, "args")
        return self


class QueuedId(_Given):
    """Which task is meant."""

    id: Id
    namespace: Name = "default"


class QueuedTask(QueuedId):
    """A task; the smaller its score, the more urgent."""

    delay: Span = "0s"
    score: int = Field(0, ge=0, le=255)
    payload: QueuedPayload


class QueuedChange(QueuedId):
    """What is to be another one; what is left out stays."""

    delay: Span | None = None
    score: int | None = Field(None, ge=0, le=255)
    payload: QueuedPayload | None = None


class QueuedState(BaseModel):
    """A task and how far it is; `delay` is what is left of it."""

    id: str
    namespace: str
    status: str
    delay: str | None = None
    score: int | None = None
    payload: dict[str, Any] | None = None


class PollQuery(_Given):
    """Which topics, separated by commas; how long to wait, and how long a task is the caller's."""

    namespace: Name = "default"
    topics: Name = "default"
    wait: Span = "20s"
    lease: Span = "60s"
    max: int = Field(1, ge=1, le=100)


class PolledTask(QueuedState):
    """A task that is the caller's until its lease ends; `ack` says that it is done."""

    ack: str


class Polled(BaseModel):
    """Tasks that are due; none: the time is over."""

    tasks: list[PolledTask]


class Acks(_Given):
    """What `poll` gave."""

    acks: list[str] = Field(min_length=1, max_length=100)


class Acked(BaseModel):
    """How many were still the caller's."""

    acked: int


def _queue(call: Call, namespace: str, topic: str) -> str:
    name = f"http.{namespace}.{topic}"
    call.identity.check_queue(name)
    return name


def _queues(call: Call, namespace: str) -> list[str]:
    """The queues of a namespace; of other processes' as well, so Redis knows them."""
    store = call.service.delayed.store
    found = store.run("SMEMBERS", http_topics(namespace, store.keys("").prefix))
    names = sorted(f"http.{namespace}.{topic.decode(errors='replace')}" for topic in found)
    return [name for name in names if call.identity.sees_queue(name)]


def _delayed(call: Call, given: QueuedId) -> TaskInfo | None:
    for queue in _queues(call, given.namespace):
        if found := first_info(_infos(call, given, queue)):
            return found
    return None


def _infos(call: Call, given: QueuedId, queue: str) -> dict[str, list[TaskInfo]]:
    """The delayed tasks with this id, by shard. The queue may also hold other tasks of Celery."""
    found = delayed_infos(call.service, call.identity, given.id, queue)
    pulled = {n: [info for info in infos if info.task == PULL_TASK] for n, infos in found.items()}
    return {shard: infos for shard, infos in pulled.items() if infos}


@operations.add("PUT", "", "schedule", {200: QueuedId, 201: QueuedId}, body=QueuedTask)
async def queued_put(call: Call) -> Any:
    """Create a task."""
    task: QueuedTask = call.body
    call.note("put", task.id)
    if await call.run(_change, call, QueuedChange(**task.model_dump())):
        return {"id": task.id}
    queue = _queue(call, task.namespace, task.payload.topics)
    await call.run(_remember, call, task)
    await call.service.writer.send_one(_row(call, task, queue))
    return Json({"id": task.id}, 201)


def _remember(call: Call, task: QueuedTask) -> None:
    store = call.service.delayed.store
    store.run("SADD", http_topics(task.namespace, store.keys("").prefix), task.payload.topics)


def _row(call: Call, task: QueuedTask, queue: str) -> Row:
    tenant = call.identity.tenant_for(None)
    options: dict[str, Any] = {"task_id": task.id, "queue": queue, "priority": task.score}
    if length := span_of(task.delay):
        options["eta"] = datetime.now(timezone.utc) + length
    if tenant is not None:
        options["headers"] = {"tenant": tenant}
    return PULL_TASK, [], _kwargs(task.score, task.payload), None, options


def _kwargs(score: int, payload: QueuedPayload) -> dict[str, Any]:
    return {"score": score, "payload": payload.model_dump()}


@operations.add("POST", "", "schedule", QueuedId, body=QueuedChange)
def queued_change(call: Call) -> dict[str, str]:
    """Change a delayed task."""
    call.note("change", call.body.id)
    if not _change(call, call.body):
        raise _not_delayed()
    return {"id": call.body.id}


def _not_delayed() -> Problem:
    return Problem(404, "there is no such task, or it is not delayed any more")


def _change(call: Call, change: QueuedChange) -> bool:
    info = _delayed(call, change)
    if info is None:
        return False
    before = job_of(call.service.app, info)
    payload = before["payload"] if change.payload is None else change.payload.model_dump()
    score = before["score"] if change.score is None else change.score
    if info.queue != f"http.{change.namespace}.{payload['topics']}":
        raise Problem.of_field("payload.topics", "it cannot be changed: delete the task", 409)
    countdown = None if change.delay is None else span_of(change.delay).total_seconds()
    return call.service.delayed.change(
        change.id,
        queue=info.queue,
        accepts=lambda each: call.identity.sees(each.queue, each.tenant),
        countdown=countdown,
        priority=score,
        kwargs={"score": score, "payload": payload},
    )


@operations.add("DELETE", "", "schedule", QueuedId, body=QueuedId)
def queued_delete(call: Call) -> dict[str, str]:
    """Cancel a delayed task."""
    given, delayed = call.body, call.service.delayed
    call.note("delete", given.id)
    for queue in _queues(call, given.namespace):
        found = _infos(call, given, queue)
        dropped = [delayed.moves.cancel(shard, infos) for shard, infos in found.items()]
        if any(dropped):
            return {"id": given.id}
    raise _not_delayed()


@operations.add("GET", "/status", "read", QueuedState)
async def queued_status(call: Call) -> Any:
    """A task; the fields may be in the body as well."""
    # Its documentation has the fields in the body of a GET.
    raw = await call.request.body()
    given = parsed(raw) if raw.strip() else dict(call.request.query_params)
    return await call.run(_status, call, validated(QueuedId, given))


def _status(call: Call, given: QueuedId) -> dict[str, Any]:
    info = _delayed(call, given)
    if info is not None:
        return _state(call, info, given.namespace, "scheduled")
    for queue in _queues(call, given.namespace):
        if found := find(call.service, call.identity, given.id, queue):
            return {"id": given.id, "namespace": given.namespace, "status": found["status"]}
    raise Problem(404, "there is no such task")


def _state(call: Call, info: TaskInfo, namespace: str, status: str) -> dict[str, Any]:
    job = job_of(call.service.app, info)
    left = info.remaining.total_seconds() if info.remaining else 0
    return {
        "id": info.id,
        "namespace": namespace,
        "status": status,
        "delay": f"{max(left, 0):.3f}".rstrip("0").rstrip(".") + "s",
        "score": job.get("score"),
        "payload": job.get("payload"),
    }


@operations.add("GET", "/poll", "schedule", Polled, query=PollQuery)
async def queued_poll(call: Call) -> dict[str, Any]:
    """Wait for tasks of some topics."""
    call.identity.require_whole()
    query: PollQuery = call.query
    queues = [
        _queue(call, query.namespace, topic) for topic in dict.fromkeys(query.topics.split(","))
    ]
    lease_ms = int(span_of(query.lease).total_seconds() * 1000)
    if lease_ms < 1:
        raise Problem.of_field("lease", "a task is the caller's for some time")
    until = time.monotonic() + min(span_of(query.wait), LONGEST_WAIT).total_seconds()
    call.service.stream_begins(call.identity)
    try:
        while True:
            found = await call.run(long_poll.claim, call.service, queues, query.max, lease_ms)
            if found or time.monotonic() >= until or await call.request.is_disconnected():
                break
            if not await call.service.pause(min(INTERVAL_SECONDS, until - time.monotonic())):
                break
            await call.check()
    finally:
        call.service.stream_ends(call.identity)
    tasks = [{**_state(call, info, query.namespace, "running"), "ack": ack} for info, ack in found]
    return {"tasks": tasks}


@operations.add("POST", "/ack", "schedule", Acked, body=Acks)
def queued_ack(call: Call) -> dict[str, int]:
    """Acknowledge tasks that were polled."""
    held = [long_poll.read_ack(ack) for ack in call.body.acks]
    for each in held:
        call.identity.check_queue(each.queue)
    call.identity.require_whole()
    count = long_poll.ack(call.service, held)
    if count == 0:
        raise Problem(409, "its lease has ended, and others may have the task")
    return {"acked": count}
