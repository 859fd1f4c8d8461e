"""Makes an app's own tools know the backlog."""

from __future__ import annotations

from celery import Celery

from .bootsteps import REQUEST, Inspection, OwnRequests
from .delayed import Delayed
from .ids import use_ids
from .signals import watch_publishing


def install(app: Celery, *, task_ids: str | None = None) -> Delayed:
    """Extend an app: `app.delayed`, revoke and inspect that know the backlog, and signals.

    Workers with a pool of threads or greenlets also skip what others have got meanwhile.

    `task_ids="uuid7"` gives the tasks of this process ids that sort by the time of sending. Call it
    where the app is made, so that workers do as well. Twice is safe.
    """
    if not isinstance(getattr(app, "delayed", None), Delayed):
        app.delayed = Delayed(app)
    app.control_cls = "celery_ext.control:Control"
    app.__dict__.pop("control", None)
    app.steps["consumer"].update({Inspection, OwnRequests})
    app.Task.Request = REQUEST
    watch_publishing()
    if task_ids is not None:
        use_ids(task_ids)
    return app.delayed
