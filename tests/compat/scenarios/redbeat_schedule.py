"""RedBeat: a schedule in Redis that beat sends from."""

from __future__ import annotations

import sys

from common import REDIS, check, empty, main, new_app, ready, running, wait_until

app = new_app("redbeat_schedule", redbeat_lock_key=None)
pointed = new_app("redbeat_schedule", redbeat_lock_key=None, redbeat_redis_url=REDIS)


def sends(name: str) -> None:
    from celery.schedules import schedule
    from redbeat import RedBeatSchedulerEntry

    which = {"app": app, "pointed": pointed}[name]
    empty(which)
    entry = RedBeatSchedulerEntry("often", "tick", schedule(run_every=1), app=which)
    entry.save()
    command = (sys.executable, "-m", "celery", "-A", f"redbeat_schedule:{name}", "beat")
    with running(*command, "-S", "redbeat.RedBeatScheduler", "--max-interval", "1"):
        wait_until(lambda: ready(which) >= 2, "beat has sent two tasks")
    entry.delete()
    empty(which)


check("with no setting of its own")(lambda: sends("app"))
check("with `redbeat_redis_url`")(lambda: sends("pointed"))

if __name__ == "__main__":
    main()
