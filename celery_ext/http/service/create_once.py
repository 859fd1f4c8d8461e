"""A task that is created once under its id, however often it is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from copy import copy
from typing import Any

from celery_ext.control.delayed import Delayed
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


def forget(delayed: Delayed, cancelled: Iterable[TaskInfo]) -> None:
    """Let the ids of cancelled tasks be created again."""
    store = delayed.store
    for info in cancelled:
        if HEADER in info.headers:
            name = ledger(info.id, info.tenant)
            # Where it was created, which is another queue if it was moved since.
            _drop(store, store.shards.all(info.queue), name) or _drop(
                store, delayed.shards(None), name
            )


def _drop(store: Store, shards: Iterable[str], ledger: str) -> int:
    return sum(store.run("DEL", store.keys(name).job(ledger)) for name in shards)


def keep(store: Store, moved: Iterable[tuple[TaskInfo, int]]) -> None:
    """Remember the ids of tasks until a day after their new due times, in ms, at the least."""
    entries = defaultdict[str, list[tuple[int, str]]](list)
    for info, due_ms in moved:
        if HEADER in info.headers:
            until_ms = due_ms + KEPT_SECONDS * 1000
            entries[info.queue].append((until_ms, ledger(info.id, info.tenant)))
    for queue, ledgers in entries.items():
        for keys in map(store.keys, store.shards.all(queue)):
            given = [part for until, name in ledgers for part in (until, keys.job(name))]
            store.run("ZADD", keys.ledgers_until, "XX", "GT", *given)


def changed(info: TaskInfo) -> dict[str, Any] | None:
    """The headers of a task that is no more as the request with its id has said."""
    return {HEADER: ""} if HEADER in info.headers else None
