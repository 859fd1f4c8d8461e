"""The HTTP dialect of a distributed delayed job queue: /v1/delayedqueue, with a long poll."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from celery_ext.errors import BROKER_FAILS
from celery_ext.tasks.task_info import TaskInfo

from ..api.endpoints.tasks import Row
from ..api.fields import span_of
from ..api.operations import Call, Json, Operations, parsed, read_any, validated
from ..api.ready import ready_of
from ..api.status import delayed_infos, find
from ..callbacks.jobs import job_of
from ..problems import Problem
from ..service.create_once import HEADER, digest_of
from . import long_poll
from .claims import ScoredStore, score_in
from .queued_models import (
    Acked,
    Acks,
    Polled,
    PollQuery,
    QueuedChange,
    QueuedId,
    QueuedState,
    QueuedTask,
    StatusQuery,
)
from .topics import Index, Topic, owner_of, topic_in

PATH = "/v1/delayedqueue"

#: The name of these tasks in their messages: no Celery worker runs it.
PULL_TASK = "celery_ext.http.pull"

#: How long a long poll waits at most.
LONGEST_WAIT = timedelta(seconds=60)

#: Attempts to create a task while others create it, or a consumer takes it, at the same time.
TRIES = 3

operations = Operations("delayedqueue", PATH, read=read_any, problems=(404, 409, 422))


def _index(call: Call) -> Index:
    return Index(call.service.delayed.store)


def _queues(call: Call, topics: Iterable[Topic]) -> Iterator[tuple[Topic, str]]:
    """The queues where tasks of some topics may be, except those that the caller may not see."""
    for topic in topics:
        for queue in topic.queues:
            if call.identity.sees_queue(queue):
                yield topic, queue


def _delayed(
    call: Call, id: str, topics: Iterable[Topic]
) -> Iterator[tuple[Topic, str, list[TaskInfo]]]:
    """The delayed tasks of some topics with an id, by shard.

    A queue may also hold other tasks of Celery, which are left out.
    """
    for topic, queue in _queues(call, topics):
        for shard, infos in delayed_infos(call.service, call.identity, id, queue).items():
            if mine := [info for info in infos if _is_of(call, info, topic)]:
                yield topic, shard, mine


def _is_of(call: Call, info: TaskInfo, topic: Topic) -> bool:
    return info.task == PULL_TASK and owner_of(info.queue, job_of(call.service.app, info)) == topic


@operations.add("PUT", "", "schedule", {200: QueuedId, 201: QueuedId}, body=QueuedTask)
async def queued_put(call: Call) -> Any:
    """Create a task under an id, once. While it is delayed, change it to match."""
    task: QueuedTask = call.body
    call.note("put", task.id)
    topic = Topic(task.namespace, topic_in(task.payload))
    call.identity.check_queue(topic.queue)
    new = _New(call, task, topic)
    store = await call.run(new.begin)
    for _ in range(TRIES):
        if await call.run(new.change, store):
            return {"id": task.id}
        if not await call.service.writer.send_once(new.row, store):
            return Json({"id": task.id}, 201)
        # An earlier copy of this request has created it, or another request has, and a consumer
        # may have taken it.
        if await call.run(new.change, store) or await call.run(store.forget, topic.queue):
            return {"id": task.id}
    raise Problem(409, "other clients keep creating and cancelling the task")


class _New:
    """A task to create once."""

    def __init__(self, call: Call, task: QueuedTask, topic: Topic) -> None:
        self._call, self._task, self._topic = call, task, topic
        self._digest = digest_of(task.model_dump())
        self._tenant = call.identity.tenant_for(None)
        self._delay_seconds = span_of(task.delay).total_seconds()

    def begin(self) -> ScoredStore:
        """Remember the task's topic. Raises a Problem while it is delayed in another topic."""
        task, service = self._task, self._call.service
        index = _index(self._call)
        before = index.find(task.namespace, task.id)
        if before not in (None, self._topic) and any(
            service.delayed.backlog(shard).get(task.id)
            for shard in service.delayed.store.shards.all(before.queue)
        ):
            raise _another_topic()
        index.note(task.namespace, task.id, self._topic.name, self._delay_seconds)
        store = ScoredStore(
            service.delayed.store, task.id, self._tenant, self._delay_seconds, self._digest
        )
        store.score = task.score
        return store

    def change(self, store: ScoredStore) -> bool:
        """Change the delayed task to match this one; returns False if none is delayed."""
        for _, _, infos in _delayed(self._call, self._task.id, [self._topic]):
            if infos[0].headers.get(HEADER) == self._digest:
                return True
            change = QueuedChange(**self._task.model_dump())
            if _change(self._call, infos[0], change, self._digest):
                store.note_change(infos[0].queue)
                return True
        return False

    @property
    def row(self) -> Row:
        task = self._task
        headers = {HEADER: self._digest}
        if self._tenant is not None:
            headers["tenant"] = self._tenant
        options: dict[str, Any] = {
            "task_id": task.id,
            "queue": self._topic.queue,
            "priority": _priority(task.score),
            "headers": headers,
        }
        if self._delay_seconds:
            length = timedelta(seconds=self._delay_seconds)
            options["eta"] = datetime.now(timezone.utc) + length
        return PULL_TASK, [], _kwargs(task.namespace, task.score, task.payload), None, options


def _another_topic() -> Problem:
    return Problem.of_field("payload.topics", "it cannot be changed: delete the task", 409)


def _priority(score: int) -> int:
    """The score as a priority, for servers of version 0.1, which know no other scores."""
    return min(max(score, 0), 255)


def _kwargs(namespace: str, score: int, payload: Any) -> dict[str, Any]:
    return {"score": score, "payload": payload, "namespace": namespace}


@operations.add("POST", "", "schedule", QueuedId, body=QueuedChange)
def queued_change(call: Call) -> dict[str, str]:
    """Change a delayed task."""
    change: QueuedChange = call.body
    call.note("change", change.id)
    for topic, _, infos in _delayed(call, change.id, _topics(call, change)):
        if _change(call, infos[0], change):
            if change.delay is not None:
                seconds = span_of(change.delay).total_seconds()
                _index(call).note(change.namespace, change.id, topic.name, seconds)
            return {"id": change.id}
    raise Problem(404, "there is no such task, or it is not delayed any more")


def _topics(call: Call, given: QueuedId) -> list[Topic]:
    return _index(call).topics(given.namespace, given.id)


def _change(call: Call, info: TaskInfo, change: QueuedChange, digest: str | None = None) -> bool:
    before = job_of(call.service.app, info)
    has_payload = "payload" in change.model_fields_set
    payload = change.payload if has_payload else before["payload"]
    score = score_in(before) if change.score is None else change.score
    if topic_in(payload) != topic_in(before["payload"]):
        raise _another_topic()
    countdown = None if change.delay is None else span_of(change.delay).total_seconds()
    return call.service.moves.change(
        info,
        call.identity,
        None if digest is None else {HEADER: digest},
        countdown=countdown,
        priority=_priority(score),
        kwargs=_kwargs(change.namespace, score, payload),
    )


@operations.add("DELETE", "", "schedule", QueuedId, body=QueuedId)
def queued_delete(call: Call) -> dict[str, str]:
    """Cancel a task that is delayed or ready."""
    given, moves = call.body, call.service.moves
    call.note("delete", given.id)
    topics = _topics(call, given)
    gone: list[TaskInfo] = []
    for _, shard, infos in _delayed(call, given.id, topics):
        gone += moves.cancel(shard, infos)
    if not gone:
        for topic, queue in _queues(call, topics):
            for task in ready_of(call.service, call.identity, [given.id], queue):
                if _is_of(call, task.info, topic):
                    gone += moves.cancel_ready([task])
    if not gone:
        raise Problem(404, "there is no such task, or a consumer has it")
    return {"id": given.id}


@operations.add("GET", "/status", "read", QueuedState, query=StatusQuery)
async def queued_status(call: Call) -> Any:
    """A task; the fields may be in the body as well."""
    # The documentation of this dialect has the fields in the body of a GET.
    raw = await call.request.body()
    given = parsed(raw) if raw.strip() else call.query.model_dump(exclude_none=True)
    return await call.run(_status, call, validated(QueuedId, given))


def _status(call: Call, given: QueuedId) -> dict[str, Any]:
    topics = _topics(call, given)
    for _, _, infos in _delayed(call, given.id, topics):
        is_due = (infos[0].due_ms or 0) <= time.time() * 1000
        return _state(call, infos[0], given.namespace, "waiting" if is_due else "scheduled")
    for _, queue in _queues(call, topics):
        found = find(call.service, call.identity, given.id, queue)
        if found and found["status"] != "scheduled":  # else it belongs to another namespace
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


@operations.add("GET", "/poll", "schedule", Polled, query=PollQuery, problems=(404, 422))
async def queued_poll(call: Call) -> dict[str, Any]:
    """Wait for tasks of some topics."""
    call.identity.require_whole()
    query: PollQuery = call.query
    topics = [Topic(query.namespace, name) for name in dict.fromkeys(query.topics.split(","))]
    for topic in topics:
        call.identity.check_queue(topic.queue)
    lease_ms = int(span_of(query.lease).total_seconds() * 1000)
    if lease_ms < 1:
        raise Problem.of_field("lease", "a task is the caller's for some time")
    until = time.monotonic() + min(span_of(query.wait), LONGEST_WAIT).total_seconds()
    waiting = long_poll.Waiting(call.service, topics)
    try:
        with call.service.polls.place(call.identity):
            claim = partial(long_poll.claim, call.service, topics, query.max, lease_ms)
            while True:
                found = await call.run(claim)
                if found or time.monotonic() >= until:
                    break
                if waiting.must_show:
                    await call.run(waiting.show)
                seconds = long_poll.interval(call.service.polls.taken.total())
                if not await call.service.pause(min(seconds, until - time.monotonic())):
                    break
                await call.check()
                if await call.request.is_disconnected():  # a task would wait for its lease's end
                    break
                claim = partial(claim, again=True)
    finally:
        if waiting.is_shown:
            with suppress(Problem, *BROKER_FAILS):  # it expires, and claimed tasks are answered
                await call.run(waiting.end)
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
        raise Problem(409, "its lease has expired, and other clients may have the task")
    return {"acked": count}
