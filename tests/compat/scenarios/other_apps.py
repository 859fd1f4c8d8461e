"""Apps with the settings of Superset and of Sentry: their forms, names and options."""

from __future__ import annotations

import os
import sys
import time

from celery import Celery
from celery.schedules import crontab
from common import BROKER, REDIS, TRANSPORT, WAIT_SECONDS, check, main, running, wait_until, worker
from kombu import Queue

RESULTS = f"{REDIS.rpartition('/')[0]}/1"
SUPERSET = os.environ["COMPAT_TOOL"].startswith("superset")


class CeleryConfig:
    """As in Superset's configuration: a class with lower-case names."""

    broker_url = BROKER
    broker_transport = TRANSPORT or None
    result_backend = RESULTS
    imports = ("other_apps",)
    worker_prefetch_multiplier = 1
    task_acks_late = False
    task_annotations = {"reports.run": {"rate_limit": "100/s"}}  # noqa: RUF012
    beat_schedule = {  # noqa: RUF012
        "reports.scheduler": {
            "task": "reports.scheduler",
            "schedule": 1.0,
            "options": {"expires": 30},
        },
        "reports.prune": {"task": "reports.prune", "schedule": crontab(minute=10, hour=0)},
    }


#: As in Sentry's configuration: old names in capitals, pickle, and many queues.
SENTRY = {
    "BROKER_URL": BROKER,
    "BROKER_TRANSPORT": TRANSPORT or None,
    "BROKER_TRANSPORT_OPTIONS": {},
    "CELERY_RESULT_BACKEND": RESULTS,
    "CELERY_IMPORTS": ("other_apps",),
    "CELERY_ENABLE_UTC": True,
    "CELERY_ACCEPT_CONTENT": {"pickle", "json"},
    "CELERY_TASK_SERIALIZER": "pickle",
    "CELERY_RESULT_SERIALIZER": "pickle",
    "CELERY_CREATE_MISSING_QUEUES": True,
    "CELERY_REDIRECT_STDOUTS": False,
    "CELERYD_HIJACK_ROOT_LOGGER": False,
    "CELERY_DEFAULT_QUEUE": "default",
    "CELERY_DEFAULT_EXCHANGE": "default",
    "CELERY_DEFAULT_EXCHANGE_TYPE": "direct",
    "CELERY_DEFAULT_ROUTING_KEY": "default",
    "CELERY_QUEUES": [
        Queue("default", routing_key="default"),
        *(Queue(f"events.{number}", routing_key=f"events.{number}") for number in range(60)),
    ],
    "CELERYBEAT_SCHEDULE": {
        "reports.scheduler": {
            "task": "reports.scheduler",
            "schedule": 1.0,
            "options": {"expires": 30, "queue": "events.7"},
        }
    },
}

app = Celery("other_apps")
app.config_from_object(CeleryConfig if SUPERSET else SENTRY)


@app.task(name="reports.run", bind=True, soft_time_limit=20)
def run(self, value: object) -> object:
    return value


@app.task(name="reports.scheduler")
def scheduler() -> None:
    run.apply_async(("scheduled",), countdown=1, time_limit=30, queue=QUEUE)
    print("the scheduler ran", flush=True)


@app.task(name="reports.prune")
def prune() -> None: ...


@app.task(name="reports.flaky", bind=True, default_retry_delay=1, max_retries=2)
def flaky(self, value: int) -> int:
    if self.request.retries < 2:
        raise self.retry()
    return value


QUEUE = "celery" if SUPERSET else "events.42"

if __name__ == "__main__":
    # As root, Celery refuses to run with pickle unless C_FORCE_ROOT is set, as in containers.
    worked = worker("other_apps", C_FORCE_ROOT="1")

    @check("tasks now and later, on its queues")
    def tasks() -> None:
        value = {1, 2} if not SUPERSET else [1, 2]
        now = run.apply_async((value,), queue=QUEUE)
        began = time.monotonic()
        later = run.apply_async((value,), queue=QUEUE, countdown=2, expires=60)
        assert now.get(timeout=WAIT_SECONDS) == later.get(timeout=WAIT_SECONDS) == value
        assert time.monotonic() - began >= 1.9

    @check("retries")
    def retries() -> None:
        assert flaky.delay(7).get(timeout=WAIT_SECONDS) == 7

    @check("its schedule, with beat")
    def schedule() -> None:
        beat = (sys.executable, "-m", "celery", "-A", "other_apps", "beat", "-l", "INFO")
        with running(*beat, until="beat: Starting", C_FORCE_ROOT="1"):
            wait_until(lambda: "the scheduler ran" in printed(), "the worker ran a scheduled task")

    with worked as printed:
        main()
