"""Blocking calls in a bounded number of threads, one for each request or one for many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from kombu_delayed.errors import UNREACHABLE

from ..problems import Problem, busy

T = TypeVar("T")

#: How many requests may share one call.
MOST = 50


class Threads:
    """Runs functions in threads, so that they do not block the event loop."""

    def __init__(self, count: int, waiting: int, seconds: float) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="delayed-http")
        self._limit = count + waiting
        self.seconds = seconds
        self._count = 0

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return what a function returns in a thread.

        Raises a Problem if too many calls wait or it takes too long.
        """
        if self._count >= self._limit:
            raise busy("too many requests are waiting")
        try:
            call = self._pool.submit(function, *args)
        except RuntimeError:
            raise busy("the server is shutting down") from None
        self._count += 1
        future = asyncio.wrap_future(call)
        future.add_done_callback(self._done)
        try:
            # Shielded: a started call continues, and counts until it ends.
            return await asyncio.wait_for(asyncio.shield(future), self.seconds)
        except (TimeoutError, asyncio.TimeoutError):
            raise self.too_late() from None
        finally:
            # If it waits for a thread, nobody needs it now: it would hold up those that are needed.
            call.cancel()

    def too_late(self) -> Problem:
        """The problem of a request that takes too long."""
        return busy(f"the broker has not answered within {self.seconds:g} s", 503, 5)

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._count -= 1
        if not future.cancelled():
            future.exception()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Together(Generic[T]):
    """Calls a function in a thread with the items of many requests.

    A thread, a round trip and the interpreter's lock cost as much for many requests as for one.
    Only one call runs at a time: a lone request does not wait, and many requests share a call.
    """

    def __init__(
        self, threads: Threads, function: Callable[[Sequence[T]], Any], waiting: int
    ) -> None:
        self._threads, self._function, self._limit = threads, function, waiting
        self._waiting: list[tuple[T, asyncio.Future[None]]] = []
        self._running: asyncio.Task[None] | None = None

    async def run(self, item: T) -> None:
        """Wait until the function has been called with an item.

        Raises what the function raised, or a Problem if too many wait or the broker is too slow.
        """
        if len(self._waiting) >= self._limit:
            raise busy("too many requests are waiting")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append((item, future))
        if self._running is None:
            self._running = loop.create_task(self._run())
        late = loop.call_later(self._threads.seconds, self._end_late, future)
        try:
            await future
        finally:
            late.cancel()

    def _end_late(self, future: asyncio.Future[None]) -> None:
        _end(future, self._threads.too_late())

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
                await self._call([each for each in batch if not each[1].done()])
        finally:
            self._running = None

    async def _call(self, batch: Sequence[tuple[T, asyncio.Future[None]]]) -> None:
        try:
            if batch:
                await self._threads.run(self._function, [item for item, _ in batch])
        except (Problem, OperationalError, RedisError, *UNREACHABLE) as error:
            for _, future in batch:
                _end(future, error)
        except Exception as error:
            if len(batch) == 1:
                _end(batch[0][1], error)
                return
            for each in batch:  # an error of one item must not fail the others
                await self._call([each])
        else:
            for _, future in batch:
                _end(future)


def _end(future: asyncio.Future[None], error: BaseException | None = None) -> None:
    if future.done():  # it took too long, or its client is gone
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
