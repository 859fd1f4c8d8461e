"""celery-singleton: one task for the same arguments, until it has run."""

from __future__ import annotations

import os
import subprocess
import sys

from celery_singleton import Singleton
from common import REDIS, check, empty, main, new_app, wait_until, worker

#: It keeps one client of Redis for the whole process: each setting has a process of its own.
SETTING = "COMPAT_SINGLETON_URL"
given = os.environ.get(SETTING)

app = new_app("singleton", **({"singleton_backend_url": given} if given else {}))


@app.task(base=Singleton, name="singleton.double")
def double(number: int) -> int:
    return 2 * number


@check("with no setting of its own")
def locks() -> None:
    empty(app)
    once = double.apply_async((1,), countdown=2)
    assert double.apply_async((1,), countdown=2).id == once.id, "it was sent twice"
    assert double.delay(2).id != once.id
    with worker("singleton"):
        assert once.get(timeout=30) == 2
        wait_until(lambda: double.delay(1).id != once.id, "the lock is free again")


@check("with `singleton_backend_url`")
def locks_elsewhere() -> None:
    variables = {**os.environ, SETTING: f"{REDIS.rpartition('/')[0]}/2"}
    run = [sys.executable, "-c", "import singleton; singleton.locks()"]
    done = subprocess.run(run, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stderr.splitlines() or [""])[-1]


if __name__ == "__main__":
    main()
