"""Celery's packages for Django, and a health check, in one project with SQLite."""

from __future__ import annotations

import json
import os
import sys

import django
from common import (
    BROKER,
    TRANSPORT,
    check,
    empty,
    main,
    new_app,
    ready,
    running,
    wait_until,
    worker,
)
from django.conf import settings

TOOL = os.environ["COMPAT_TOOL"]

settings.configure(
    SECRET_KEY="x",
    USE_TZ=True,
    INSTALLED_APPS=[
        "django.contrib.contenttypes",
        *{
            "django-celery-beat": ["django_celery_beat"],
            "django-celery-results": ["django_celery_results"],
        }.get(TOOL, ["health_check"]),
    ],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.path.abspath("db.sqlite3"),
            "OPTIONS": {"timeout": 30},
        }
    },
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    CELERY_BROKER_URL=BROKER,
    CELERY_BROKER_TRANSPORT=TRANSPORT or None,
)
django.setup()

app = new_app("django_tools", result_extended=True)
if TOOL == "django-celery-results":
    app.conf.result_backend = "django-db"
app.conf.beat_scheduler = "django_celery_beat.schedulers:DatabaseScheduler"


@app.task
def double(number: int) -> int:
    return 2 * number


if TOOL == "django-celery-beat":

    @check("Beat sends the tasks that the database schedules")
    def beat() -> None:
        from django_celery_beat.models import IntervalSchedule, PeriodicTask

        often, _ = IntervalSchedule.objects.get_or_create(every=1, period="seconds")
        PeriodicTask.objects.create(
            interval=often, name="often", task="django_tools.double", args=json.dumps([2])
        )
        command = (sys.executable, "-m", "celery", "-A", "django_tools", "beat")
        with running(*command, "-l", "INFO", "--max-interval", "1", until="beat: Starting"):
            wait_until(lambda: ready(app) >= 2, "beat has sent two tasks")

    @check("such a task runs")
    def runs() -> None:
        with worker("django_tools", "-P", "solo") as printed:
            wait_until(lambda: "succeeded" in printed(), "a task ran")


if TOOL == "django-celery-results":

    @check("results of delayed tasks are in the database")
    def results() -> None:
        from django_celery_results.models import TaskResult

        with worker("django_tools", "-P", "solo"):
            ids = [double.apply_async((n,), countdown=n).id for n in (0, 1)]
            done = TaskResult.objects.filter(task_id__in=ids, status="SUCCESS")
            wait_until(lambda: done.count() == 2, "both results are there")
            assert {each.result for each in done} == {"0", "2"}


if TOOL == "django-health-check":

    @check("the ping check finds the workers")
    def ping() -> None:
        import asyncio
        from inspect import isawaitable

        from health_check.contrib.celery import Ping

        async def outcome() -> str:
            found = Ping(app=app).run()
            return str(await found) if isawaitable(found) else str(found)

        with worker("django_tools", "-P", "solo"):
            made = asyncio.run(outcome())
            assert not any(bad in made.lower() for bad in ("unhealthy", "error")), made


if __name__ == "__main__":
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    main()
    empty(app)
