"""The periodic tasks of an app: those of celery beat, and of django-celery-beat's database."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from celery import Celery
from celery.schedules import BaseSchedule, crontab, maybe_schedule, schedule

from ..app.queues import routed_queue

#: How many entries of a database are read.
MOST = 2_000

DJANGO = "django_celery_beat"
SCHEDULES = ("interval", "crontab", "solar", "clocked")


@dataclass(frozen=True)
class PeriodicTask:
    """An entry. `next` is None if only its beat knows it, or if it will not run again.

    `runs` and `last` may be None too.
    """

    name: str
    task: str
    when: str
    queue: str | None = None
    args: str = "()"
    kwargs: str = "{}"
    is_enabled: bool = True
    last: datetime | None = None
    next: datetime | None = None
    runs: int | None = None
    problem: str = ""


def periodic_tasks(app: Celery) -> list[PeriodicTask]:
    """All entries, ordered by their next run. Raises the errors of Django's database."""
    app.loader.import_default_modules()
    app.finalize()
    found = [*_of_beat(app), *_of_django(app)]
    never = datetime.max.replace(tzinfo=timezone.utc)
    return sorted(found, key=lambda each: (each.next or never, each.name))


def _of_beat(app: Celery) -> Iterator[PeriodicTask]:
    entries: Mapping[str, Any] = app.conf.beat_schedule or {}
    for name, given in entries.items():
        try:
            yield _entry(app, str(name), given)
        except Exception as error:  # any error that a beat would report
            yield _invalid(name, error)


def _invalid(name: object, error: Exception) -> PeriodicTask:
    return PeriodicTask(str(name), "", "", is_enabled=False, problem=str(error)[:300])


def _entry(app: Celery, name: str, given: Mapping[str, Any]) -> PeriodicTask:
    when = maybe_schedule(given["schedule"], given.get("relative", False), app=app)
    task, args, kwargs = str(given["task"]), given.get("args") or (), given.get("kwargs") or {}
    return PeriodicTask(
        name,
        task,
        _words(when),
        (given.get("options") or {}).get("queue") or routed_queue(app, task, args, kwargs),
        repr(tuple(args)),
        repr(dict(kwargs)),
        next=_next(when, None),
    )


def _next(when: Any, last: datetime | None) -> datetime | None:
    """When it is due. An interval counts from its last run, which only the beat's own file has.

    A beat writes the last run to a database some minutes later.
    """
    is_interval = type(when) is schedule
    if last is None and is_interval:
        return None
    left = when.remaining_estimate(last if last and is_interval else when.now())
    return None if left is None or left.total_seconds() < 0 else datetime.now(timezone.utc) + left


def _words(when: BaseSchedule) -> str:
    """The `repr` of a schedule without brackets; the fields of a crontab in the usual order."""
    if not isinstance(when, crontab):
        return repr(when).strip("<>").strip()
    parts = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
    words = " ".join(str(getattr(when, f"_orig_{part}")) for part in parts)
    return f"crontab: {words}" if type(when) is crontab else f"crontab: {words}, {when.tz}"


def close_old_connections() -> None:
    """Close this thread's old connections to Django's database, as Django does after a request.

    Do not call it in a thread of the caller's, which may be in the middle of a transaction.
    """
    if _django_apps() is not None:
        from django.db import close_old_connections

        close_old_connections()


def _django_apps() -> Any:
    """Django's apps, or None unless this program has set up django-celery-beat."""
    module = sys.modules.get("django.apps")
    if module is None or not module.apps.ready or not module.apps.is_installed(DJANGO):
        return None
    return module.apps


def _of_django(app: Celery) -> Iterator[PeriodicTask]:
    """The entries of django-celery-beat, if this program has set it up."""
    if (apps := _django_apps()) is None:
        return
    model = apps.get_model(DJANGO, "PeriodicTask")
    for row in model.objects.select_related(*SCHEDULES)[:MOST]:
        try:
            found = _row(app, row)
        except Exception as error:  # any error that a beat would report
            found = _invalid(row.name, error)
        yield found


def _row(app: Celery, row: Any) -> PeriodicTask:
    when, now = row.schedule, datetime.now(timezone.utc)
    last, start, expires = map(_aware, (row.last_run_at, row.start_time, row.expires))
    is_enabled = row.enabled and (expires is None or expires > now)
    following = _next(when, last) if is_enabled else None
    if is_enabled and start is not None and start > now:
        following = max(following or start, start)
    return PeriodicTask(
        row.name,
        row.task,
        _words(when),
        row.queue or routed_queue(app, row.task, *_arguments(row)),
        str(row.args),
        str(row.kwargs),
        is_enabled,
        last,
        following,
        row.total_run_count,
    )


def _arguments(row: Any) -> tuple[Any, Any]:
    return json.loads(row.args or "[]"), json.loads(row.kwargs or "{}")


def _aware(at: datetime | None) -> datetime | None:
    """A time of the database with a zone. It has none if Django's setting USE_TZ is off."""
    if at is None or at.tzinfo is not None:
        return at
    from django.utils import timezone as zones

    return zones.make_aware(at, zones.get_default_timezone())
