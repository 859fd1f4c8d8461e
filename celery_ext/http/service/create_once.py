"""Creates a task once under its id, however often it is requested."""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any

from celery_ext.control.changes.change import Change, change
from celery_ext.control.changes.moves import NOW, Due, Moves, due_at
from celery_ext.control.changes.ready import ReadyTask
from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.gate_usage import server_ms
from kombu_delayed.store.calls.scripts import Call
from kombu_delayed.store.store import Entry, Store

from ..auth.identity import Identity

#: How long an id is remembered after its due time.
KEPT_SECONDS = 86_400

#: The header of a task that was created under an id: the digest of the request.
HEADER = "delayed_request"


def digest_of(given: Mapping[str, Any]) -> str:
    """A digest that identifies a request, even one with text that is not valid UTF-8."""
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]


def ledger(id: str, tenant: str | None) -> str:
    """The name of the ledger of an id, which may be a tenant's, among the ledgers of jobs."""
    return f"http:{id}" if tenant is None else f"http:{id}\x1f{tenant}"


class OnceStore(Store):
    """A store that accepts an id once, for as long as its ledger is kept.

    The ledger has the digests of the requests that created the task or changed it.
    """

    def __init__(
        self, store: Store, id: str, tenant: str | None, delay_seconds: float, digest: str = "run"
    ) -> None:
        vars(self).update(vars(copy(store)))
        self._id, self._ledger = id, ledger(id, tenant)
        self._seconds = int(max(delay_seconds, 0)) + KEPT_SECONDS
        self._run_name = f"\x1f{digest}"

    def call(self, name: str, queue: str, owner: str | None = None, /, **given: Any) -> Call:
        """As in any store, but scheduling skips messages whose ids are in the ledger."""
        if name != "schedule":
            return super().call(name, queue, owner, **given)
        given |= {"run": self._run_name, "attempt": "", "ledger_seconds": self._seconds}
        return super().call("schedule_once", queue, self._ledger, **given)

    def schedule_call(self, queue: str, entries: Sequence[Entry], expires_ms: int = 0) -> Call:
        """As in any store. Ids of messages that a policy has delayed further are kept longer."""
        self._outlast(int(each.due) for each in entries if each.due.isdecimal())
        return super().schedule_call(queue, entries, expires_ms)

    def _outlast(self, dues_ms: Iterable[int]) -> None:
        longest = max(dues_ms, default=0) // 1000 + 1 - int(time.time()) + KEPT_SECONDS
        self._seconds = max(self._seconds, longest)

    def remembers(self, queue: str) -> bool:
        """Returns whether a task was created under the id in a queue."""
        return any(map(self._has_ledger, self.shards.nearest(queue, self._id)))

    def _has_ledger(self, shard: str) -> bool:
        keys = self.keys(shard)
        name = keys.job(self._ledger)
        until = self.run("ZSCORE", keys.ledgers_until, name)  # others drop it later
        is_past = until is not None and float(until) <= server_ms(self, shard)
        return not is_past and bool(self.run("EXISTS", name))

    def remember(self, queue: str) -> None:
        """Remember the id of a task that was sent to a queue without this store.

        If this process dies in between, the next request sends it again.
        """
        shards = self.shards.nearest(queue, self._id)
        found = chain.from_iterable(Backlog(self, shard).get(self._id) for shard in shards)
        self._outlast(each.kept.due_ms for each in found)
        home = self.shards.place(queue, self._id)
        self.ask("schedule", home, entries=[], expires_ms=0, dictionary="")

    def note_change(self, queue: str) -> None:
        """Note in the ledger that the existing task was changed to match this request."""
        for shard in self.shards.nearest(queue, self._id):
            name = self.keys(shard).job(self._ledger)
            if self.run("EXISTS", name):
                self.run("HSET", name, self._run_name, 1)

    def forget(self, queue: str) -> bool:
        """Free the id, unless this very request has made the task; returns whether it has."""
        shards = self.shards.nearest(queue, self._id)
        found = [
            self.ask("forget_request", shard, self._ledger, run=self._run_name) for shard in shards
        ]
        return any(found)


class OnceMoves(Moves):
    """Moves that also update the ledgers of tasks that were created once.

    A later due time keeps the id until a day after it; cancelling frees the id.
    """

    def cancel(self, shard: str, infos: Sequence[TaskInfo]) -> list[TaskInfo]:
        """As for any task; the ids can then be used again."""
        return self._forget(super().cancel(shard, infos))

    def cancel_ready(self, tasks: Sequence[ReadyTask]) -> list[TaskInfo]:
        """As for any task; the ids can then be used again."""
        return self._forget(super().cancel_ready(tasks))

    def reschedule(self, shard: str, infos: Sequence[TaskInfo], dues: Iterable[Due]) -> int:
        """As for any task; the ids are remembered until a day after the new due times."""
        dues = [*dues]
        self._keep(zip(infos, dues, strict=True))
        return super().reschedule(shard, infos, dues)

    def postpone(self, task: ReadyTask, due: Due, now_ms: int | None = None) -> bool:
        """As for any task; its id is remembered until a day after the new due time."""
        self._keep([(task.info, due)])
        return super().postpone(task, due, now_ms)

    def change(
        self,
        info: TaskInfo,
        identity: Identity,
        headers: Mapping[str, Any] | None = None,
        **to: Any,
    ) -> bool:
        """As `Delayed.change`, for a task that `identity` may see.

        The task then no longer matches the request that created it, so the request's digest is
        cleared, unless `headers` have another one.
        """
        if HEADER in info.headers:
            headers = {HEADER: "", **(headers or {})}
        given = Change(headers=headers, **to)

        def accepts(each: TaskInfo) -> bool:
            return identity.sees(each.queue, each.tenant)

        is_changed = change(self._queues, info.id, given, info.queue, accepts)
        if is_changed and (due_ms := given.due_ms()) is not None:
            self._keep([(info, due_at(due_ms))])
        return is_changed

    def _forget(self, cancelled: list[TaskInfo]) -> list[TaskInfo]:
        store, moved = self._queues.store, list[str]()
        for info in cancelled:
            if HEADER in info.headers:
                name = ledger(info.id, info.tenant)
                if not _drop(store, store.shards.all(info.queue), [name]):
                    moved.append(name)
        if moved:  # or their ledgers have expired: each is in the queue where its task was created
            _drop(store, self._queues.shards(None), moved)
        return cancelled

    def _keep(self, moved: Iterable[tuple[TaskInfo, Due]]) -> None:
        store, ledgers = self._queues.store, defaultdict[str, list[tuple[int, str]]](list)
        for info, due in moved:
            if HEADER in info.headers and due != NOW:
                until_ms = int(due[0]) + KEPT_SECONDS * 1000
                ledgers[info.queue].append((until_ms, ledger(info.id, info.tenant)))
        for queue, those in ledgers.items():
            for keys in map(store.keys, store.shards.all(queue)):
                entries = [part for until, name in those for part in (until, keys.job(name))]
                store.run("ZADD", keys.ledgers_until, "XX", "GT", *entries)


def _drop(store: Store, shards: Iterable[str], ledgers: Sequence[str]) -> int:
    """Drop some ledgers in each of these shards; returns how many there were."""
    return sum(store.run("DEL", *map(store.keys(name).job, ledgers)) for name in shards)
