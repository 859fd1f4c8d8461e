"""A bounded number of threads for blocking calls, and a bounded number of waiting calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..problems import Problem, busy

T = TypeVar("T")


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
            future = asyncio.get_running_loop().run_in_executor(self._pool, function, *args)
        except RuntimeError:
            raise busy("the server is shutting down") from None
        self._count += 1
        future.add_done_callback(self._done)
        try:
            # Shielded: a started call continues, and counts until it ends.
            return await asyncio.wait_for(asyncio.shield(future), self.seconds)
        except (TimeoutError, asyncio.TimeoutError):
            raise self.too_late() from None

    def too_late(self) -> Problem:
        """The problem of a request that takes too long."""
        return busy(f"the broker has not answered within {self.seconds:g} s", 503, 5)

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._count -= 1
        if not future.cancelled():
            future.exception()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
