"""Tasks: create, read, change, delete, run now, search."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import chain
from typing import Any

import celery.app.base
from celery import Celery
from starlette.responses import Response

from celery_ext.control.changes.moves import NOW
from celery_ext.control.delayed import Delayed
from celery_ext.control.outcomes import recorded_in
from celery_ext.http.callbacks.jobs import BY_STATUS, JOB_TASK, is_job
from celery_ext.http.callbacks.ssrf_guard import CallbackRefused, check_form
from celery_ext.http.options import HOW
from celery_ext.http.problems import Problem
from celery_ext.http.service import create_once
from celery_ext.http.service.service import Service
from celery_ext.tasks.history import TaskHistory
from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.consumer.policy.of_message import HEADER
from kombu_delayed.errors import OptionError

from ..fields import ID_PATTERN, aware
from ..models import Created, History, OneQueue, TaskState
from ..operations import Call, Json, Operations
from ..ready import Waiting, ready_of, waiting_of
from ..status import (
    Ask,
    State,
    delayed_infos,
    find,
    find_elsewhere,
    first_info,
    history_of,
    is_crowded,
    look_up,
    state_of,
    with_id,
)
from ..task_models import RESERVED, NewTask, NewTaskWithId, TaskChange

PREFIX = "/v1/tasks"

#: The states of recorded tasks that a worker has, or that will be tried again.
ACTIVE = frozenset({"received", "running", "retrying"})

#: The fields of a task that are shown to those who may change it and not read it.
ALWAYS_SHOWN = frozenset({"id", "status", "waiting_for", "task", "queue", "due", "priority"})

Row = tuple[Any, Any, Any, Any, dict[str, Any]]

operations = Operations("tasks", PREFIX)


def row_of(call: Call, new: NewTask, id: str, due: datetime | None, by_status: bool = True) -> Row:
    """The row of a new task for `schedule_many`. Raises a Problem if the task is not allowed.

    `by_status`: the receiver of an HTTP job answers by status alone.
    """
    service = call.service
    tenant = call.identity.tenant_for(new.tenant)
    name, args, kwargs, queue = new.task or JOB_TASK, new.args, new.kwargs, new.queue
    if new.is_job:
        _check_job(new, service)
        args, queue = [], queue or service.options.job_queue or None
        kwargs = {
            "topic": new.topic,
            "callback": new.callback,
            "content": new.content,
            "retry": new.retries,
            "created": int(time.time()),
        }
        if chosen := new.job_options:
            kwargs["options"] = chosen
    else:
        service.check_task(name)
    service.check_route(call.identity, name, args, kwargs, queue)
    options: dict[str, Any] = {"task_id": id}
    if due is not None:
        options["eta"] = due
    if queue is not None:
        options["queue"] = queue
    if new.priority is not None:
        options["priority"] = new.priority
    if new.expires is not None:
        options["expires"] = aware(new.expires).isoformat()
    headers: dict[str, Any] = {**call.trace, **new.headers}
    if new.is_job and by_status:
        headers[BY_STATUS] = 1
    if tenant is not None:
        headers["tenant"] = tenant
    if new.policies:
        headers[HEADER] = _policies(new.policies)
    if headers:
        options["headers"] = headers
    return service.app.tasks.get(name) or name, args, kwargs, None, options


def _policies(given: list[dict[str, Any]]) -> str:
    """The header of policies. Raises a Problem, for one that could take slots of others, too."""
    from celery_ext.policies.of_message import write  # few callers need it

    if any("LimitUse" in each for each in given):
        raise Problem.of_field("policies", "LimitUse is for programs that use the broker itself")
    try:
        return write(given)
    except OptionError as error:
        raise Problem.of_field("policies", str(error)) from None


def _check_job(new: NewTask, service: Service) -> None:
    options = service.options
    if not options.callbacks:
        raise Problem.of_field("callback", f"this server takes no HTTP jobs: {HOW}")
    for name in ("callback", "failure_callback"):
        if (url := getattr(new, name)) is not None:
            try:
                check_form(url, options.callback_allow)
            except CallbackRefused as error:
                raise Problem.of_field(name, str(error)) from None
    if new.timeout is not None and new.timeout > (most := options.callback_longest_seconds):
        raise Problem.of_field(
            "timeout", f"{new.timeout:g} s is longer than the {most:g} s that this server allows"
        )


def new_id() -> str:
    """A new id, as Celery makes them in this process."""
    return str(celery.app.base.uuid())


def created(id: str, due: datetime | None) -> dict[str, Any]:
    ahead = due is not None and due > datetime.now(timezone.utc)
    shown = due.isoformat() if due else None
    return {"id": id, "status": "scheduled" if ahead else "waiting", "due": shown}


@operations.add("POST", "", "schedule", {201: Created}, body=NewTaskWithId)
async def create_task(call: Call) -> Response:
    """Create a task or an HTTP job."""
    new: NewTaskWithId = call.body
    id, due = new.id or new_id(), new.due_at
    call.note("create", id)
    await call.service.writer.send_one(row_of(call, new, id, due))
    location = f"{call.request.scope.get('root_path', '')}{PREFIX}/{id}"
    return Json(created(id, due), 201, {"Location": location})


@operations.add(
    "PUT", "/{id}", "schedule", {200: Created, 201: Created}, body=NewTask, problems=(409,)
)
async def put_task(call: Call) -> Response:
    """Create a task under an id, once. While it is delayed, change it to match."""
    new: NewTask = call.body
    id, due, service = _checked_id(call), new.due_at, call.service
    call.note("put", id)
    *row, options = row_of(call, new, id, due)
    digest = create_once.digest_of(new.model_dump(exclude_unset=True))
    headers = {**options.get("headers", {}), create_once.HEADER: digest}
    if not await call.run(_elsewhere, call, id):
        delay = (due - datetime.now(timezone.utc)).total_seconds() if due else 0
        tenant = headers.get("tenant")
        store = await call.run(
            lambda: create_once.OnceStore(service.delayed.store, id, tenant, delay)
        )
        if not await service.writer.send_once((*row, {**options, "headers": headers}), store):
            return Json(created(id, due), 201)
    headers["expires"] = options.get("expires")
    changes = {"kwargs": row[2], "headers": headers, "eta": due or datetime.now(timezone.utc)}
    return Json(await call.run(_put_again, call, id, new, changes))


def _elsewhere(call: Call, id: str) -> bool:
    """Returns whether the task is delayed already, in any queue.

    Raises a Problem if another tenant's task has the id.
    """
    service = call.service
    if delayed_infos(service, call.identity, id):
        return True
    if call.identity.tenants and any(_delayed_anywhere(service.delayed, id)):
        raise Problem.of_field("id", "it is taken", 409)
    return False


def _put_again(call: Call, id: str, new: NewTask, changes: dict[str, Any]) -> State:
    service, digest = call.service, changes["headers"][create_once.HEADER]
    info = first_info(delayed_infos(service, call.identity, id))
    if info and info.headers.get(create_once.HEADER) != digest:
        _replace(call, info, new, changes)
    found = find(service, call.identity, id)
    if found is None:
        crowded = is_crowded(service, call.identity, new.queue)
        return {"id": id, "status": "waiting" if crowded else "done", "due": None}
    return {name: found[name] for name in ("id", "status", "due")}


def _replace(call: Call, info: TaskInfo, new: NewTask, changes: dict[str, Any]) -> None:
    if info.task != (new.task or JOB_TASK):
        raise Problem.of_field("task", f"{info.id} is another task; delete it first", 409)
    if new.queue is not None and new.queue != info.queue:
        raise Problem.of_field("queue", f"{info.id} is in another queue; delete it first", 409)
    if info.tenant != changes["headers"].get("tenant"):
        raise Problem.of_field("id", "a task of another tenant has it", 409)
    dropped = info.headers.keys() - RESERVED - changes["headers"].keys()
    changes["headers"] |= dict.fromkeys(dropped)
    call.service.moves.change(
        info,
        call.identity,
        priority=_priority(call.service.app, info.task, new.priority),
        args=new.args,
        **changes,
    )


def _priority(app: Celery, task: str, given: int | None) -> int:
    """The priority of a task, by the rules of Celery."""
    own = getattr(app.tasks.get(task), "priority", None)
    found = (each for each in (given, own, app.conf.task_default_priority) if each is not None)
    return next(found, 0)


def _checked_id(call: Call) -> str:
    if not re.fullmatch(ID_PATTERN, call.id):
        raise Problem.of_field("id", f"an id has the form {ID_PATTERN}")
    return call.id


@operations.add("GET", "/{id}", "read", TaskState, query=OneQueue, problems=(404,))
async def get_task(call: Call) -> State:
    """A task with its status."""
    ask = Ask(call.identity, call.id, call.query.queue)
    try:
        await call.service.together(look_up).run(ask)
        found = ask.state or await call.run(find_elsewhere, call.service, ask)
    except call.service.errors_of_one_queue:
        found = await call.run(find, call.service, ask.identity, ask.id, ask.queue)
    if found is None:
        raise Problem(404, "there is no such task")
    return found


@operations.add("GET", "/{id}/history", "read", History, query=OneQueue, problems=(404,))
def get_history(call: Call) -> dict[str, Any]:
    """The steps of a task over all attempts, as workers have recorded them."""
    found = history_of(call.service, call.identity, call.id, call.query.queue)
    if found is None:
        raise Problem(404, "no worker has recorded this task")
    return found.as_dict()


@operations.add(
    "PATCH", "/{id}", "schedule", TaskState, body=TaskChange, query=OneQueue, problems=(404, 409)
)
def change_task(call: Call) -> State:
    """Change a task that is delayed or ready."""
    change: TaskChange = call.body
    service, id = call.service, call.id
    call.note("change", id)
    delayed, ready = _waiting_or_problem(call)
    info = first_info(delayed) or ready[0].info
    if change.args is not None or change.kwargs is not None:
        _check_arguments_of(service, info)
    is_changed = service.moves.change(
        info,
        call.identity,
        eta=change.due_at,
        priority=change.priority,
        args=change.args,
        kwargs=change.kwargs,
    )
    if not is_changed:
        raise _taken()
    if still_ready := ready_of(service, call.identity, [id], info.queue) if ready else []:
        return _shown(call, state_of(service, still_ready[0].info))
    return _shown(call, find(service, call.identity, id, info.queue) or {})


def _shown(call: Call, state: State) -> State:
    """The state of a changed task, without its content if the caller may not read."""
    if call.identity.has("read"):
        return state
    return {name: value for name, value in state.items() if name in ALWAYS_SHOWN}


def _check_arguments_of(service: Service, info: TaskInfo) -> None:
    """Raises a Problem if new arguments would make a task that the caller may not schedule."""
    if is_job(info):
        raise Problem.of_field("args", "an HTTP job has none; PUT it with another content")
    if not service.may_schedule(info.task):
        reason = (
            f"those of {info.task[:100]!r} stay as they are: the server's app does not allow it"
        )
        raise Problem.of_field("args", reason)


def _waiting_or_problem(call: Call) -> Waiting:
    """The delayed tasks of the request, by shard, or else the ready ones.

    Raises a Problem if there is none.
    """
    queue = call.query.queue if call.query else None
    if waiting := waiting_of(call.service, call.identity, call.id, queue):
        return waiting
    found = find(call.service, call.identity, call.id, queue)
    if found is None:
        raise Problem(404, "there is no such task")
    raise Problem(409, f"the task is neither delayed nor ready: {found['status']}")


@operations.add(
    "POST", "/{id}/terminate", "admin", {202: TaskState}, query=OneQueue, problems=(404, 409)
)
def terminate_task(call: Call) -> Response:
    """End the process that runs a task, as soon as its worker receives the request."""
    call.note("terminate", call.id)
    return Json(terminate(call, call.id, call.query.queue), 202)


def terminate(call: Call, id: str, queue: str | None) -> State:
    """Tell the workers to end a task; returns its state before that.

    Raises a Problem if the task does not run.
    """
    found = find(call.service, call.identity, id, queue)
    if found is None:
        raise Problem(404, "there is no such task")
    if _is_shared(call, id):
        raise Problem.of_field("id", "another task has it, which the workers would end, too", 409)
    record = history_of(call.service, call.identity, id, found["queue"])
    if record is None or not call.service.delayed.terminate(id, record.queue):
        raise Problem(409, f"no worker has recorded that it runs the task: it is {found['status']}")
    return found


def _is_shared(call: Call, id: str) -> bool:
    """Whether a task that the caller may not see has the id, and runs or may still run."""
    identity, delayed = call.identity, call.service.delayed
    if not (identity.tenants or identity.queues):
        return False
    shards = delayed.shards(None)
    ready, _ = delayed.ready_index.find(delayed.store, shards, id)
    found: Iterator[TaskInfo | TaskHistory] = chain(
        (each for each in recorded_in(delayed, shards, id) if each.state in ACTIVE),
        _delayed_anywhere(delayed, id),
        (TaskInfo.of(each.found()) for each in ready),
    )
    return not all(identity.sees(each.queue, each.tenant) for each in found)


def _delayed_anywhere(delayed: Delayed, id: str) -> Iterator[TaskInfo]:
    """The delayed tasks with an id, in all queues."""
    for shard in with_id(delayed.store, delayed.shards(None), id):
        yield from (TaskInfo.waiting(shard, each) for each in delayed.backlog(shard).get(id))


def _taken() -> Problem:
    return Problem(409, "a worker has taken the task meanwhile")


@operations.add("DELETE", "/{id}", "schedule", {204: None}, query=OneQueue, problems=(404, 409))
def delete_task(call: Call) -> Response:
    """Cancel a task that is delayed or ready."""
    call.note("delete", call.id)
    moves = call.service.moves
    infos, ready = _waiting_or_problem(call)
    gone = [info for shard, each in infos.items() for info in moves.cancel(shard, each)]
    gone += [info for task in ready for info in moves.cancel_ready([task])]
    if not gone:
        raise _taken()
    return Response(status_code=204)


@operations.add("POST", "/{id}/run-now", "schedule", Created, query=OneQueue, problems=(404, 409))
def run_task_now(call: Call) -> dict[str, Any]:
    """Run a delayed task now, or a ready one before all others."""
    call.note("run-now", call.id)
    moves = call.service.moves
    infos, ready = _waiting_or_problem(call)
    moved = [moves.run_now(shard, each) for shard, each in infos.items()]
    moved += [moves.postpone(task, NOW) for task in ready]
    if not any(moved):
        raise _taken()
    return {"id": call.id, "status": "waiting", "due": datetime.now(timezone.utc).isoformat()}
