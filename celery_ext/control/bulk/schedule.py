"""Sends many tasks in few calls, with the same messages that Celery would send one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from celery import Celery, signals
from celery.app.routes import MapRoute
from celery.canvas import Signature
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError, ResponseError

from celery_ext.app.capture import Capture, Captured
from celery_ext.app.queues import Queues
from celery_ext.app.signals import others_listen, task_scheduled
from celery_ext.errors import BulkError
from celery_ext.tasks.progress import Progress, reporting
from celery_ext.tasks.task_info import task_in
from kombu_delayed.consumer.policy.decisions import planned
from kombu_delayed.consumer.policy.of_message import written_in
from kombu_delayed.errors import NotReplicated, translate
from kombu_delayed.store.store import Entry, Store, UniqueOutcome
from kombu_delayed.transport.batch import BATCH_BYTES, Outbox

from .message_template import Template, Unfit
from .rows import Call, RowError, Timed, call_of, refuse_others

#: How many refused rows a report lists with their reasons.
REFUSED_SIZE = 1_000

#: How many templates are kept at a time, and how many rows of a kind are tried as a template.
TEMPLATES, TRIES = 1_000, 3


#: Errors of a broker or of the connection to it.
_FAILURES = RedisError, OperationalError, NotReplicated, OSError

#: Maps the kind or the pattern of a row to its template, or to the number of tries to make one.
Templates = dict[Any, Template | int]


class Refused(NamedTuple):
    """A row that was not sent: its number, counted from 0, and the reason."""

    row: int
    reason: str


@dataclass
class BulkReport:
    """The result of scheduling rows.

    `rows` is the number of processed rows. `delayed`, `ready` (due at once) and `already`
    (existed before) count messages; `refused` counts rows, the first of which are in `refusals`.
    """

    rows: int = 0
    delayed: int = 0
    ready: int = 0
    already: int = 0
    refused: int = 0
    refusals: list[Refused] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        """Messages that were not there before."""
        return self.delayed + self.ready


def schedule_many(
    delayed: Queues,
    rows: Iterable[Any],
    *,
    batch: int = 1000,
    progress: bool | Progress | None = None,
    store: Store | None = None,
    on_refused: Callable[[Refused], None] | None = None,
    templates: Templates | None = None,
) -> BulkReport:
    """Send a task for each row, as `apply_async` or `send_task` would, `batch` rows at a time.

    Fewer rows are sent together once they have 8 MB.

    A row is a signature, or (task or its name, args, kwargs, eta, options) with the last ones
    optional, or a Call or Timed whose times are already checked. Rows are read in order as they are
    sent. A row that cannot be sent is refused and does not stop the others. `progress` is called
    with a number of rows; True shows a bar on the terminal. `store` takes the messages instead of
    the broker's own. `on_refused` is called with each refused row before the next one is read, and
    the report then only counts them. Raises BulkError if the broker fails.
    """
    if batch < 1:
        raise ValueError(f"schedule_many takes a batch of at least 1 row, not {batch!r}")
    bulk = _Bulk(delayed, batch, store or delayed.store, on_refused, templates)
    with reporting(progress, rows, "scheduling") as done:
        return bulk.run(rows, done)


class _Bulk:
    def __init__(
        self,
        delayed: Queues,
        batch: int,
        store: Store,
        on_refused: Callable[[Refused], None] | None,
        templates: Templates | None,
    ) -> None:
        self.app: Celery = delayed.app
        self.batch = batch
        self.report = BulkReport()
        self._sent = 0
        self._on_refused = on_refused
        channel = delayed.connection.default_channel
        self._outbox = Outbox(store, channel.global_keyprefix, self._count)
        self._capture = Capture(self.app, channel)
        self._rules = channel.rules
        self._store = store
        self._templates: Templates = {} if templates is None else templates
        self._is_stock = _is_stock(self.app)
        self._at_once = self._send_now if _is_watched() else None

    def run(self, rows: Iterable[Any], done: Progress) -> BulkReport:
        number = self._sent
        try:
            for number, row in enumerate(rows, 1):
                self._add(number - 1, row)
                count = number - self._sent
                if count == self.batch or self._outbox.size_bytes >= BATCH_BYTES:
                    self._send(number)
                    done(count)
            left = number - self._sent
            self._send(number)
            with self._failing():
                self._outbox.confirm()
            self.report.rows = number
            done(left)
            return self.report
        finally:
            self._outbox.close()

    def _send(self, number: int) -> None:
        with self._failing():
            self._outbox.execute()
        self.report.rows, self._sent = self._sent, number

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BulkError:
            raise
        except _FAILURES as error:
            meaning = translate(error) if isinstance(error, ResponseError) else error
            raise BulkError(
                f"the broker failed; the first {self.report.rows:,} rows were processed, and "
                f"some of the next {2 * self.batch:,} may have been. The call that failed: "
                f"{meaning}",
                self.report,
            ) from error

    def _count(self, verb: str, answer: Any) -> None:
        if verb == "schedule":
            self.report.delayed += answer.delayed
            self.report.ready += answer.ready
            self.report.already += answer.already

    def _add(self, number: int, row: Any) -> None:
        try:
            if type(row) is Timed:
                self._add_timed(row)
            elif type(row) is Call:
                self._add_call(row)
            elif isinstance(row, Signature) and type(row) is not Signature:
                refuse_others(self.app, row.app)
                self._captured(row.apply_async)
            else:
                self._add_call(call_of(self.app, row))
        except BulkError:
            raise
        except _FAILURES:  # while finding out where the row goes
            with self._failing():
                raise
        except Exception as error:  # any error of Celery, a router or a serializer
            self._refuse(number, error)

    def _refuse(self, number: int, error: Exception) -> None:
        report = self.report
        report.refused += 1
        kind = "" if isinstance(error, RowError) else f"{type(error).__name__}: "
        if self._on_refused is not None:
            self._on_refused(Refused(number, f"{kind}{error}"))
        elif len(report.refusals) < REFUSED_SIZE:
            report.refusals.append(Refused(number, f"{kind}{error}"))

    def _add_call(self, call: Call) -> None:
        kind = call.kind if self._is_stock else None
        template = self._templates.get(kind, 0) if kind is not None else TRIES
        if isinstance(template, Template):
            try:
                entry = template.fill(call.args, call.kwargs, call.options)
            except Unfit:
                self._by_celery(call)
            else:
                self._schedule(template.queue, entry, template.expires_ms)
            return
        sent = self._by_celery(call)
        if template < TRIES:
            self._learn(kind, call, sent, template + 1)

    def _add_timed(self, row: Timed) -> None:
        template = self._templates.get(row.pattern)
        if isinstance(template, Template):
            try:
                entry = template.fill_timed(row)
            except Unfit:
                self._by_celery(row.call)
            else:
                self._schedule(template.queue, entry, template.expires_ms)
            return
        call = row.call
        self._add_call(call)
        template = self._templates.get(call.kind)
        if self._is_stock and isinstance(template, Template):
            self._templates[row.pattern] = template

    def _by_celery(self, call: Call) -> list[Captured]:
        task = call.task
        send = partial(self.app.send_task, task) if isinstance(task, str) else task.apply_async
        own = {"add_to_parent": False, "retry": False}
        return self._captured(send, call.args, call.kwargs, **{**call.options, **own})

    def _captured(self, send: Callable[..., Any], *args: Any, **options: Any) -> list[Captured]:
        with self._failing():
            messages = self._capture.of(send, *args, at_once=self._at_once, **options)
        self._put(messages)
        return messages

    def _put(self, messages: list[Captured]) -> None:
        for verb, given in messages:
            if verb == "sent":
                self._count_unique(*given)
            elif verb == "publish":
                self._outbox.publish(*given)
            else:
                self._schedule(*given)

    def _count_unique(self, outcome: UniqueOutcome) -> None:
        report, state = self.report, outcome.state
        report.delayed += state == "delayed"
        report.ready += state == "ready"
        report.already += state == "already"

    def _schedule(self, queue: str, entry: Entry, expires_ms: int) -> None:
        # Messages that are due now go this way too: it keeps the messages of a queue in order.
        if self._rules is not None:
            task = task_in(entry.message.encode())
            own = written_in(entry.message)
            entry = planned(self._rules, queue, task, own, entry, self._store)
        entry = entry if entry.due else entry._replace(due="0")
        self._outbox.schedule(queue, entry, expires_ms)

    def _send_now(self, messages: list[Captured]) -> None:
        self._put(messages)
        with self._failing():
            self._outbox.execute()
            self._outbox.confirm()

    def _learn(self, kind: Any, call: Call, sent: list[Captured], tries: int) -> None:
        """Make a template if possible, so that the next rows of this kind are filled in."""
        if len(self._templates) >= TEMPLATES:
            self._templates.clear()
        self._templates[kind] = tries
        if len(sent) != 1 or not _is_stock_task(self.app, call.task):
            return
        with suppress(Exception):  # the row is already sent; Celery makes the next ones too
            self._templates[kind] = Template(self.app, call, sent[0])


def _is_watched() -> bool:
    """Returns whether a signal has receivers for each message that is sent."""
    return bool(
        others_listen(signals.after_task_publish)
        or signals.task_sent.receivers
        or task_scheduled.receivers
    )


def _is_stock(app: Celery) -> bool:
    """Returns whether messages depend only on a task, its arguments and its options."""
    amqp = app.amqp
    return (
        not signals.before_task_publish.receivers
        and not _is_watched()
        and not app.conf.task_always_eager
        and not app.conf.task_send_sent_event
        and app.conf.task_protocol == 2
        and all(isinstance(route, MapRoute) for route in amqp.routes)
        and _is_of(type(app).send_task, "celery.app.base")
        and _is_of(type(amqp).as_task_v2, "celery.app.amqp")
        and _is_of(type(amqp.router).route, "celery.app.routes")
        and _is_of(amqp.send_task_message, "celery.app.amqp")
        and _is_quiet(app.backend)
    )


def _is_quiet(backend: Any) -> bool:
    """Returns whether a result backend has nothing to prepare for a task.

    The one of Redis subscribes to results that this process waits for; nothing waits for them here.
    """
    call = type(backend).on_task_call
    return _is_of(call, "celery.backends.base") or _is_of(call, "celery.backends.redis")


def _is_stock_task(app: Celery, task: Any) -> bool:
    if isinstance(task, str):
        task = app._tasks.get(task)
    if task is None:
        return True
    kind = task.__class__  # it may be a proxy
    return (
        _is_of(kind.apply_async, "celery.app.task")
        and _is_of(kind.shadow_name, "celery.app.task")
        and _is_of(kind._get_exec_options, "celery.app.task")
        and getattr(task, "_dump_pydantic_arguments", None) is None
    )


def _is_of(function: Any, module: str) -> bool:
    """Returns whether a function is Celery's own, and not one of an instrumentation."""
    return getattr(function, "__module__", "") == module and not hasattr(function, "__wrapped__")
