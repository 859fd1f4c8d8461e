"""A task that is created once under its id, however often it is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.store.calls.scripts import Call
from kombu_delayed.store.store import Store

#: How long after its due time an id is remembered.
KEPT_SECONDS = 86_400

#: The header of a task that was created by a request with an id: the request's digest.
HEADER = "delayed_request"


def ledger(id: str, tenant: str | None) -> str:
    """What the ledger of a tenant's id is called among those of jobs."""
    return f"http:{id}" if tenant is None else f"http:{id}\x1f{tenant}"


class OnceStore(Store):
    """A store that takes an id once, for as long as its ledger is kept.

    The ledger says of which requests, by their digests, the task was made.
    """

    def __init__(
        self, store: Store, id: str, tenant: str | None, delay_seconds: float, digest: str = "run"
    ) -> None:
        vars(self).update(vars(copy(store)))
        self._id, self._ledger = id, ledger(id, tenant)
        self._seconds = int(max(delay_seconds, 0)) + KEPT_SECONDS
        self._run_name = f"\x1f{digest}"

    def call(self, name: str, queue: str, owner: str | None = None, /, **given: Any) -> Call:
        """As of any store; what schedules does it for what was not there before."""
        if name != "schedule":
            return super().call(name, queue, owner, **given)
        given |= {"run": self._run_name, "ledger_seconds": self._seconds}
        return super().call("schedule_once", queue, self._ledger, **given)

    def _ledgers(self, queue: str) -> list[str]:
        return [
            self.keys(shard).job(self._ledger) for shard in self.shards.nearest(queue, self._id)
        ]

    def was_made(self, queue: str) -> bool:
        """Whether the task was made, or changed, by the same request before."""
        found = (self.run("HGET", name, self._run_name) for name in self._ledgers(queue))
        return any(int(count or 0) for count in found)

    def note_change(self, queue: str) -> None:
        """The task that is there was changed to be as this request says."""
        for name in self._ledgers(queue):
            if self.run("EXISTS", name):
                self.run("HSET", name, self._run_name, 1)

    def forget(self, queue: str) -> None:
        """Take the id again."""
        for name in self._ledgers(queue):
            self.run("DEL", name)


def forget(store: Store, cancelled: Iterable[TaskInfo]) -> None:
    """Let the ids of cancelled tasks be created again."""
    for info in cancelled:
        if HEADER in info.headers:
            for name in store.shards.all(info.queue):
                store.run("DEL", store.keys(name).job(ledger(info.id, info.tenant)))
