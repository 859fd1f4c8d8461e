"""The pools gevent and eventlet."""

from __future__ import annotations

import os
import time

from common import check, empty, main, new_app, ready, wait_until, worker

app = new_app("greenlets", task_acks_late=True)
POOL = os.environ["COMPAT_TOOL"]


@app.task
def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@check("200 tasks at once, half of them delayed")
def many() -> None:
    with worker("greenlets", "-P", POOL, "-c", "100"):
        found = [nap.apply_async((0.2,), countdown=n % 2) for n in range(200)]
        assert sum(each.get(timeout=60) for each in found) > 39.9


@check("a warm shutdown finishes running tasks")
def shutdown() -> None:
    with worker("greenlets", "-P", POOL, "-c", "10") as printed:
        result = nap.delay(2)
        wait_until(lambda: "received" in printed(), "the task has been received")
    assert result.get(timeout=1) == 2
    assert ready(app) == 0


if __name__ == "__main__":
    main()
    empty(app)
