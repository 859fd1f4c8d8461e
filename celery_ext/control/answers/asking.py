"""Expects an answer: sends the task that waits for it, unless the answer has already arrived."""

from __future__ import annotations

import json
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from celery import Celery, Task, _state
from celery.backends.base import DisabledBackend
from celery.canvas import Signature
from celery.result import AsyncResult
from celery.states import READY_STATES
from celery.utils.log import get_logger

from celery_ext.app import signals
from celery_ext.app.capture import Capture, Captured
from celery_ext.errors import AlreadyExpected, ExpectationError
from celery_ext.tasks.times import length_ms
from kombu_delayed.consumer.policy.decisions import ALL_QUEUES
from kombu_delayed.inspection.expectations import ANSWER_HEADER, Reply
from kombu_delayed.message.envelope import to_json

from .expectation_queue import ExpectationQueue, name_of
from .options import HOW, ExpectationOptions
from .waiting_task import register

#: The id of an expectation is derived from the asking task and the key: a second run has the same.
_NAMESPACE = uuid.UUID("6f4ce7a2-4b8e-4d4f-9a55-2f3bb5d3c3d1")

#: A process makes one message at a time, because all share a channel. The lock is reentrant: with
#: Python 3.14 an error of a signal handler may leave it locked (python/cpython#148874).
_making = threading.RLock()

logger = get_logger(__name__)

#: The state until the answer arrives; the result's `info` has the key, the tenant and the timeout.
EXPECTING = "EXPECTING"


@dataclass(frozen=True)
class Expectation:
    """An expectation and its state: "open", or how it ended.

    It ends as "answered" or "failed" (even if the answer came first), "timed_out" or "cancelled".
    """

    key: str
    tenant: str | None
    id: str
    state: str
    app: Celery

    @property
    def result(self) -> AsyncResult:
        """Its result, which is the answer."""
        return self.app.AsyncResult(self.id)


def expect(
    key: str,
    *,
    timeout: float | str | timedelta | None = None,
    on_response: Signature | None = None,
    on_timeout: Signature | None = None,
    on_failure: Signature | None = None,
    tenant: str | None = None,
    as_result: bool = False,
    app: Celery | None = None,
) -> Expectation:
    """Wait for one answer under a key until the timeout, without blocking.

    Exactly one of the signatures is sent, at least once: `on_response` with the payload in front of
    its arguments, `on_failure` with the error's text, or `on_timeout` with the key. `timeout` is
    seconds, `"2h"` or a timedelta. `tenant` is by default that of the task that asks. If that task
    runs again, it expects nothing new under the same key.

    With `as_result` the task that asks ends here, as with `self.replace`: the answer becomes its
    result, and its chain and chord continue with it. Outside of tasks, pass `app`. Raises
    AlreadyExpected if another question uses the key, and ExpectationError for invalid values.
    """
    task = _asking_task()
    app = _checked_app(app or (task.app if task else None), task, as_result)
    tenant = tenant if tenant is not None or task is None else _tenant_of(task)
    name = name_of(key, tenant)
    given = {"on_response": on_response, "on_timeout": on_timeout, "on_failure": on_failure}
    queue = ExpectationQueue(app)
    asking = _Asking(
        queue,
        key,
        tenant,
        name,
        _timeout_ms(queue, task, timeout),
        {what: _checked(what, each, tenant) for what, each in given.items() if each is not None},
    )
    if as_result and task is not None:
        return asking.replace(task)
    return asking.send(_id(task, name))


def _asking_task() -> Task | None:
    task: Task | None = _state.get_current_task()
    return None if task is None or task.request.id is None else task


def _checked_app(app: Celery | None, task: Task | None, as_result: bool) -> Celery:
    """Return the app. Raises ExpectationError if it cannot expect an answer here."""
    if app is None:
        raise ExpectationError("outside of a task, expect needs app=…")
    if app.conf.task_always_eager:
        raise ExpectationError(
            "with task_always_eager nothing can wait for an answer; test with a broker and a "
            "worker: the fixtures delayed_app and delayed_worker"
        )
    if not ExpectationOptions.are_set(app):
        raise ExpectationError(f"this app expects no answers: {HOW}")
    if as_result and (task is None or task.request.is_eager):
        raise ExpectationError("expect(as_result=True) needs a task that a worker runs")
    return app


def _id(task: Task | None, name: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, f"{task.request.id} {name}") if task else uuid.uuid4())


def _tenant_of(task: Task) -> str | None:
    found = (task.request.headers or {}).get("tenant")
    return None if found is None else str(found)


def _timeout_ms(queue: ExpectationQueue, task: Task | None, timeout: Any) -> int:
    if timeout is not None:
        return length_ms("timeout", timeout)
    of_policy = _policy_timeout_ms(task) if task else None
    return of_policy or int(queue.options.timeout_seconds * 1000)


def _policy_timeout_ms(task: Task) -> int | None:
    """The time of the `Timeout` of the message, or else of its task, its queue or all queues."""
    module = sys.modules.get("celery_ext.policies.times.timeout")
    of_message = sys.modules.get("celery_ext.policies.of_message")
    if module is None or of_message is None:  # declaring one imports it
        return None
    options = task.app.conf.broker_transport_options or {}
    queue = (task.request.delivery_info or {}).get("routing_key", "")
    declared = options.get("delayed_policies") or {}
    own = (*of_message.policies_in(task.request.headers), *(getattr(task, "policies", None) or ()))
    policies = (*own, *declared.get(queue, ()), *declared.get(ALL_QUEUES, ()))
    return next((each.after_ms for each in policies if isinstance(each, module.Timeout)), None)


def _checked(what: str, given: Any, tenant: str | None) -> Signature:
    """A copy with its tenant and an id, so that it has the same id whenever it is sent."""
    if not isinstance(given, Signature):
        raise ExpectationError(f"{what} takes a signature, such as task.s(), not {given!r}"[:300])
    found = given.clone()
    found.options.setdefault("task_id", str(uuid.uuid4()))
    if tenant is not None:
        found.options["headers"] = {"tenant": tenant, **(found.options.get("headers") or {})}
    return found


@dataclass(frozen=True)
class _Asking:
    queue: ExpectationQueue
    key: str
    tenant: str | None
    name: str
    timeout_ms: int
    signatures: dict[str, Signature]

    def send(self, id: str) -> Expectation:
        return self._expect(id, self._signature().set(task_id=id).apply_async)

    def replace(self, task: Task) -> Expectation:
        """Raises Ignore, which ends the task."""
        signature = self._signature().set(ignore_result=task.request.ignore_result)
        return self._expect(task.request.id, partial(task.replace, signature))

    def _signature(self) -> Signature:
        tenant = {"tenant": self.tenant} if self.tenant is not None else {}
        waiting = register(self.queue.app)
        return waiting.si(key=self.key, tenant=self.tenant, **self.signatures).set(
            queue=self.queue.options.queue,
            countdown=self.timeout_ms / 1000,
            headers={ANSWER_HEADER: None, **tenant},
            retry=False,
        )

    def _expect(self, id: str, send: Callable[[], Any]) -> Expectation:
        app, broker = self.queue.app, self.queue.broker
        replies: list[Reply] = []
        _ = broker.store  # connects as Celery's settings say
        try:
            with _making:
                capture = Capture(app, broker.connection.default_channel)
                capture.of(send, at_once=lambda sent: replies.append(self._put(sent)))
        finally:
            if replies:
                self._signal(replies[0])
        return Expectation(self.key, self.tenant, id, replies[0].said, app)

    def _put(self, sent: list[Captured]) -> Reply:
        """Store the captured message as an expectation. Raises AlreadyExpected."""
        if len(sent) != 1 or sent[0].verb != "schedule":
            raise ExpectationError(
                f"the queue {self.queue.options.queue!r} of expectations takes no delayed task"
            )
        _, entry, _ = sent[0].given
        payload = json.loads(entry.message)
        payload["headers"]["delayed_unique"] = self.name
        entry = entry._replace(message=to_json(payload))
        until = datetime.now(timezone.utc) + timedelta(milliseconds=self.timeout_ms)
        if not payload["headers"].get("ignore_result"):
            store_expecting(self.queue.app, entry.id, self.key, self.tenant, until)
        kept_ms = self.queue.options.remember_ms
        reply = self.queue.move(
            lambda correlation: correlation.expect(self.name, entry, self.timeout_ms, kept_ms)
        )
        if reply.said == "refused":
            raise AlreadyExpected(self.key, reply.id)
        return reply

    def _signal(self, reply: Reply) -> None:
        signals.answer_expected.send(
            sender=self.queue.app, key=self.key, tenant=self.tenant, id=reply.id, state=reply.said
        )


def store_expecting(app: Celery, id: str, key: str, tenant: str | None, until: datetime) -> None:
    """Store the state in the result backend, unless the expectation has already ended."""
    try:
        backend = app.backend
        if isinstance(backend, DisabledBackend) or backend.get_state(id) in READY_STATES:
            return
        info = {"key": key, "tenant": tenant, "until": until.isoformat()}
        backend.store_result(id, info, EXPECTING)
    except Exception as error:  # the expectation itself is in the broker
        logger.warning("Expectation %s is not shown in the result backend: %s", id, error)
