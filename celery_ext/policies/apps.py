"""The Celery apps of this process, and the policies of their tasks."""

from __future__ import annotations

from time import monotonic
from typing import Any

from celery import Celery, _state

from kombu_delayed.consumer.policy.decisions import Declared

from .policy import Policy, checked

#: The transport option that has the policies of queues.
OPTION = "delayed_policies"

#: How often tasks are checked for policies.
LOOK_SECONDS = 1.0


class Apps:
    """The Celery apps of this process that have declared these policies, or all if none has."""

    def __init__(self, declared: Declared | None) -> None:
        self._declared = declared
        self._policies: dict[str, tuple[Policy, ...]] = {}
        self._until, self._count = 0.0, 0

    def with_task(self, name: str) -> Celery | None:
        """Return an app that has a task, or None if there is none, or none yet."""
        return next((app for app in self._own() if name in app._tasks), None)

    def policies_of_tasks(self) -> dict[str, tuple[Policy, ...]]:
        """Return the policies of all tasks that have some, by task name, as of a moment ago.

        It is the same object as long as nothing can have changed.
        """
        count = sum(len(app._tasks) for app in list(_state._get_active_apps()))
        if (now := monotonic()) < self._until and count == self._count:
            return self._policies
        tasks = {name: task for app in self._own() for name, task in app._tasks.items()}
        self._policies = {
            name: checked(f"task {name}", tasks[name].policies)
            for name in sorted(tasks)
            if getattr(tasks[name], "policies", None) is not None
        }
        self._until, self._count = now + LOOK_SECONDS, count
        return self._policies

    def of(self, task: str) -> Celery:
        """Return the app that has a task, or else one that might have it."""
        return self.with_task(task) or next(iter(self._own()), None) or _state.get_current_app()

    def _own(self) -> list[Celery]:
        apps = list(_state._get_active_apps())
        return [*filter(self._is_own, apps)] or apps

    def _is_own(self, app: Celery) -> bool:
        if not app.configured:
            return False
        return declared_by(app) is self._declared


def declared_by(app: Celery) -> Declared | None:
    """Return the policies of queues in the settings of an app."""
    return (app.conf.broker_transport_options or {}).get(OPTION)


def policies_of(task: Any) -> tuple[Policy, ...]:
    """Return the policies that a task was declared with, which were not checked yet."""
    return tuple(getattr(task, "policies", None) or ())
