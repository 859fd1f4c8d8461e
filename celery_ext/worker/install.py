"""Extends an app's own tools so that they know the backlog."""

from __future__ import annotations

from celery import Celery

from ..app.ids import use_ids
from ..app.signals import watch_burials, watch_publishing
from ..control.delayed import Delayed
from ..control.unique import watch_sending
from .bootsteps import Inspection, Lateness, Names, Recording
from .hooks import extend_workers
from .remote.heard_revokes import HeardRevokes
from .requests.revoked import RevokedTasks


def install(app: Celery, *, task_ids: str | None = None, late_seconds: float = 60) -> Delayed:
    """Extend an app with `app.delayed`, signals, and a revoke and inspect that see the backlog.

    Workers report their names to the broker. When they stop, they give back at once the tasks that
    they have not started, and they skip tasks that other workers have taken over. If a task reaches
    a worker more than `late_seconds` after its ETA, the signal `task_late` is sent.

    With `task_ids="uuid7"`, the ids of tasks that this process sends sort by the time of sending.
    Call this where you create the app, so that workers call it too. Calling it twice is safe.
    """
    if task_ids is not None:
        use_ids(task_ids)
    if not isinstance(getattr(app, "delayed", None), Delayed):
        app.delayed = Delayed(app)
        watch_sending(app.delayed)
    app.delayed.late_seconds = late_seconds
    app.control_cls = "celery_ext.worker.remote.remote_control:Control"
    app.__dict__.pop("control", None)
    app.steps["consumer"].update({HeardRevokes, Inspection, Lateness, Names, RevokedTasks})
    app.steps["worker"].add(Recording)
    extend_workers(app)
    watch_publishing()
    watch_burials()
    return app.delayed
