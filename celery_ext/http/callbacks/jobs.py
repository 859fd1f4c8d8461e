"""HTTP jobs: the task that posts to a callback URL when it is due."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject
from celery.utils.log import get_task_logger

from celery_ext.app.broker import own_broker
from celery_ext.control.outcomes import SHORT
from celery_ext.errors import BROKER_FAILS
from celery_ext.tasks.body import read_body
from celery_ext.tasks.history import REPLACED
from celery_ext.tasks.task_info import TaskInfo
from celery_ext.tasks.times import OWN_LIMIT_SECONDS
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.ready.index import ReadyIndex

from ..options import HttpOptions
from .bulkhead import Busy, Place, pause_seconds
from .job_options import WITHOUT_BODY, JobOptions, backoff_seconds
from .post import TOO_MANY, Answer, CallbackFailed, post
from .signature import sign, sign_webhook
from .ssrf_guard import CallbackRefused, check_form, resolve

#: The name of the task.
JOB_TASK = "celery_ext.http.post"

#: How often a receiver may answer that it has too many requests, and how long it may make us wait.
POSTPONED_LIMIT, POSTPONED_SECONDS = 100, 86_400

#: How long a job waits if Redis fails, on average.
FAILED_SECONDS = 10.0

#: How long a worker keeps a job that it must give back, so that it does not get it again at once.
GIVE_BACK_SECONDS = 5.0

#: The header of jobs whose receiver answers by status alone, unlike in the dialect "Later".
BY_STATUS = "delayed_by_status"

#: How often a failure callback is retried.
FAILURE_RETRIES = 5

#: The header with the number of the attempt, from 1 on.
ATTEMPT = "Delayed-Attempt"

logger = get_task_logger(__name__)


def register(app: Celery, slots: int = 0) -> None:
    """Let an app send HTTP jobs, and run them in `slots` slots if these are not 0. Idempotent."""
    task = app.task(
        _run,
        name=JOB_TASK,
        bind=True,
        shared=False,
        acks_late=True,
        # A job that fails in an unforeseen way becomes a dead letter instead of being lost.
        acks_on_failure_or_timeout=False,
        reject_on_worker_lost=True,
        ignore_result=True,
        max_retries=None,
    )
    task.slots = slots or getattr(task, "slots", 0)
    # A job ends by its own timeout, and is then retried as its creator has chosen. Processes that
    # only send jobs set no limit, not even the limit of the app.
    app.finalize()
    task.time_limit = task.soft_time_limit = OWN_LIMIT_SECONDS if task.slots else None


def is_job(info: TaskInfo) -> bool:
    return info.task == JOB_TASK


def job_of(app: Celery, info: TaskInfo) -> dict[str, Any]:
    """The arguments of an HTTP job; empty if they cannot be read."""
    body = read_body(app, info)
    found = body[1] if body else None
    return dict(found) if isinstance(found, dict) else {}


def _run(
    task: Task,
    topic: str,
    callback: str,
    content: Any = None,
    retry: int = 3,
    created: int = 0,
    postponed: int = 0,
    options: dict[str, Any] | None = None,
) -> None:
    if _is_followed(task):
        raise Ignore(REPLACED)
    chosen = JobOptions(**(options or {}))
    try:
        answer = _post_in_place(task, chosen, topic, callback, content)
    except CallbackRefused as error:
        raise _dead(task, chosen, f"the callback is refused: {error}") from None
    except CallbackFailed as error:
        _again(task, chosen, retry, error)
    except BROKER_FAILS as error:
        logger.warning("HTTP job %s waits, because the broker failed: %s", task.request.id, error)
        _postpone(task, FAILED_SECONDS * random.uniform(0.5, 1.5), postponed)
    if isinstance(answer, Busy):
        _postpone(task, pause_seconds(answer), postponed)
    elif answer.code == TOO_MANY:
        if postponed >= POSTPONED_LIMIT:
            raise _dead(task, chosen, f"its receiver had too many requests {POSTPONED_LIMIT} times")
        wait = answer.retry_after
        wait = backoff_seconds(min(postponed, 6)) if wait is None else max(wait, 1)
        _postpone(task, min(wait, POSTPONED_SECONDS), postponed + 1)


def _is_followed(task: Task) -> bool:
    """Returns whether a worker died between sending the next attempt and acknowledging this one."""
    delivery = task.request.delivery_info or {}
    if not delivery.get("redelivered"):
        return False
    try:
        waiting = _waiting(task, str(delivery.get("routing_key")))
        return any(_follows(task, info) for info in waiting)
    except BROKER_FAILS as error:
        raise _given_back(task, error) from None


def _waiting(task: Task, queue: str) -> Iterator[TaskInfo]:
    """The tasks with the id of a job that are delayed, or ready in a list that is not long."""
    store, id = own_broker(task.app).store, task.request.id
    shards = store.shards.nearest(queue, id)
    for shard in shards:
        yield from (TaskInfo.waiting(shard, each) for each in Backlog(store, shard).get(id))
    ready, _ = ReadyIndex().find(store, shards, id, SHORT)
    yield from (TaskInfo.of(each.found()) for each in ready)


def _follows(task: Task, info: TaskInfo) -> bool:
    """Returns whether a task is a later attempt of the job, and not another job with its id."""
    request = task.request
    if not is_job(info) or _unpostponed(job_of(task.app, info)) != _unpostponed(request.kwargs):
        return False
    this, other = (
        (each.get("replaced_task_nesting") or 0, each.get("retries") or 0)
        for each in (request, info.headers)
    )
    return other > this


def _unpostponed(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "postponed": 0}


def _post_in_place(
    task: Task, chosen: JobOptions, topic: str, callback: str, content: Any
) -> Answer | Busy:
    """Call the callback; returns the answer, or why the host has no free place."""
    settings, id = HttpOptions.of(task.app), task.request.id
    seconds = chosen.seconds(settings.callback_seconds, settings.callback_longest_seconds)
    target = check_form(callback, settings.callback_allow)
    body = json.dumps({"id": id, "topic": topic, "content": content}).encode()
    if chosen.method in WITHOUT_BODY:
        body = b""
    defaults = {"Content-Type": "application/json", "User-Agent": "kombu-delayed"}
    headers = {
        **chosen.with_headers(defaults),
        ATTEMPT: str(task.request.retries + 1),
        **sign(settings.callback_secrets, body),
        **sign_webhook(settings.callback_secrets, id, body),
    }
    place, timed_out = Place(task, settings, target.host.rstrip(".")), False
    if busy := place.take():
        return busy
    began = time.monotonic()
    try:
        return post(
            target,
            resolve(target, settings.callback_allow),
            body,
            headers,
            method=chosen.method,
            seconds=seconds,
            limit_bytes=settings.callback_bytes,
            by_status=bool((task.request.headers or {}).get(BY_STATUS)),
        )
    except (OSError, CallbackFailed) as error:
        timed_out = time.monotonic() - began >= seconds
        if isinstance(error, CallbackFailed):
            raise
        raise CallbackFailed(f"{type(error).__name__}: {error}") from None
    finally:
        place.vacate(timed_out)


def _again(task: Task, chosen: JobOptions, retry: int, error: Exception) -> None:
    """Raises the exception that retries the job later, or makes it a dead letter."""
    done = task.request.retries
    if done >= retry:
        failed = f"{done + 1} attempts failed, the last one" if done else "its only attempt failed"
        raise _dead(task, chosen, f"{failed}: {error}") from None
    wait = chosen.pause_seconds(done)
    logger.info("HTTP job %s is retried in %.0f s: %s", task.request.id, wait, error)
    try:
        again = task.retry(countdown=wait, max_retries=None, throw=False)
    except Reject as rejected:  # Celery would make it a dead letter
        raise _given_back(task, rejected.reason) from None
    raise again from None


def _postpone(task: Task, seconds: float, postponed: int) -> None:
    """Schedule another attempt that does not count as a retry, and raise what ends this one."""
    request = task.request
    _send(
        task,
        {**request.kwargs, "postponed": postponed},
        countdown=seconds,
        retries=request.retries,
        replaced_task_nesting=request.replaced_task_nesting + 1,
    )
    raise Ignore(REPLACED)


def _send(task: Task, kwargs: dict[str, Any], **options: Any) -> None:
    """Send a job that follows this one. If that fails, raises what gives this one back."""
    request = task.request
    try:
        task.signature_from_request(request, request.args, kwargs, **options).apply_async()
    except BROKER_FAILS as error:
        raise _given_back(task, error) from None


def _given_back(task: Task, error: object) -> Reject:
    logger.warning(
        "HTTP job %s returns to its queue, because the broker failed: %s", task.request.id, error
    )
    time.sleep(GIVE_BACK_SECONDS)
    return Reject(str(error), requeue=True)


def _dead(task: Task, chosen: JobOptions, reason: str) -> Reject:
    """Send the failure callback; returns the exception that makes the job a dead letter."""
    request = task.request
    logger.warning("An HTTP job becomes a dead letter: %s", reason)
    if chosen.failure_callback is not None:
        content = {name: request.kwargs.get(name) for name in ("callback", "topic")}
        headers = {
            name: value
            for name, value in (request.headers or {}).items()
            if not name.startswith("delayed_")
        }
        content |= {"id": request.id, "reason": reason, "attempts": request.retries + 1}
        _send(
            task,
            {
                "topic": request.kwargs.get("topic"),
                "callback": chosen.failure_callback,
                "content": content,
                "retry": FAILURE_RETRIES,
            },
            task_id=f"{request.id}.failure",
            countdown=0,
            expires=None,
            retries=0,
            headers={**headers, BY_STATUS: 1},
        )
    return Reject(reason, requeue=False)
