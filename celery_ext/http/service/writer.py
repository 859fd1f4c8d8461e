"""Sends tasks from one thread; tasks that arrive while it is busy share the next call."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from celery_ext.app.queues import routed_queue
from celery_ext.control.bulk.schedule import BulkReport, Refused, Templates, schedule_many
from celery_ext.control.delayed import Delayed
from celery_ext.control.unique import UniqueTask
from celery_ext.errors import BulkError

from ..problems import broker_failed, busy, refused
from .create_once import OnceStore

#: How many tasks are sent in one call.
BATCH = 1_000

#: Why rows were refused, by their numbers.
Refusals = dict[int, str]


@dataclass
class _Order:
    """The rows of one request, or another call for the writer's thread."""

    rows: Sequence[Any]
    call: Callable[[], Any] | None
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class Writer:
    """Accepts rows for `schedule_many`, and answers when Redis has stored them."""

    def __init__(self, delayed: Delayed, limit: int, seconds: float) -> None:
        self._delayed = delayed
        self._limit, self._seconds = limit, seconds
        self._orders: deque[_Order] = deque()
        self._rows = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._templates: Templates = {}

    async def send(self, rows: Sequence[Any]) -> Refusals:
        """Send rows; returns those that were refused. Raises a Problem if the broker fails."""
        refusals: Refusals = await self._put(rows, None)
        return refusals

    async def send_one(self, row: Any) -> None:
        """Send a row. Raises a Problem if it is refused or the broker fails."""
        for reason in (await self.send([row])).values():
            raise refused(reason)

    async def send_once(self, row: Any, store: OnceStore) -> bool:
        """Send a row to another store; returns whether it existed. Raises as `send_one`."""
        report = await self._put([row], lambda: self._once(row, store))
        for _, reason in report.refusals:
            raise refused(reason)
        return bool(report.already)

    def _once(self, row: Any, store: OnceStore) -> BulkReport:
        task, args, kwargs, _, options = row
        queue = None
        if isinstance(task, UniqueTask):  # sent at once, and not to this store
            with suppress(Exception):  # without a route it is refused below
                given = args, kwargs, options.get("queue")
                queue = routed_queue(self._delayed.app, task.name, *given)
        if queue and store.remembers(queue):
            return BulkReport(rows=1, already=1)
        report = schedule_many(self._delayed, [row], store=store)
        if queue and report.accepted:
            store.remember(queue)
        return report

    async def _put(self, rows: Sequence[Any], call: Callable[[], Any] | None) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._changed:
            if self._closed or self._rows + len(rows) > max(self._limit, len(rows)):
                raise busy("too many tasks are waiting to be sent")
            self._rows += len(rows)
            self._orders.append(_Order(rows, call, future, loop))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="delayed-http-writer")
                self._thread.daemon = True
                self._thread.start()
            self._changed.notify()
        try:
            return await asyncio.wait_for(future, self._seconds)
        except BulkError as error:
            raise broker_failed(error, "the broker failed; the task may be stored") from error
        except (TimeoutError, asyncio.TimeoutError):
            problem = busy(f"the broker has not answered within {self._seconds:g} s", 503, 5)
            problem.detail += "; the tasks may be stored, and can be sent again with the same ids"
            raise problem from None

    def close(self) -> None:
        """Send the accepted rows, and accept no more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(self._seconds)

    def _run(self) -> None:
        while orders := self._next():
            outcome = self._dealt_with(orders)
            with self._changed:
                self._rows -= sum(len(order.rows) for order in orders)
            by_loop: dict[asyncio.AbstractEventLoop, list[Any]] = {}
            for order, found in zip(orders, outcome, strict=True):
                by_loop.setdefault(order.loop, []).append((order.future, found))
            for loop, done in by_loop.items():
                with suppress(RuntimeError):  # the loop was closed: nobody waits there
                    loop.call_soon_threadsafe(_resolve, done)

    def _next(self) -> list[_Order]:
        """The next orders, to be sent together; empty if the writer was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._orders or self._closed)
            taken: list[_Order] = []
            count = 0
            while self._orders and (not taken or count + len(self._orders[0].rows) <= BATCH):
                if self._orders[0].call is not None:
                    return taken or [self._orders.popleft()]
                taken.append(self._orders.popleft())
                count += len(taken[-1].rows)
            return taken

    def _dealt_with(self, orders: list[_Order]) -> list[Any]:
        try:
            if (call := orders[0].call) is not None:
                return [call()]
            return self._send(orders)
        except Exception as error:
            return [error] * len(orders)

    def _send(self, orders: list[_Order]) -> list[Refusals]:
        found: list[Refused] = []
        rows = [row for order in orders for row in order.rows]
        schedule_many(
            self._delayed, rows, batch=BATCH, on_refused=found.append, templates=self._templates
        )
        refusals, start = {each.row: each.reason for each in found}, 0
        outcome = []
        for order in orders:
            numbers = range(len(order.rows)) if refusals else ()
            outcome.append({n: refusals[start + n] for n in numbers if start + n in refusals})
            start += len(order.rows)
        return outcome


def _resolve(done: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, found in done:
        if future.done():
            continue
        if isinstance(found, Exception):
            future.set_exception(found)
        else:
            future.set_result(found)
