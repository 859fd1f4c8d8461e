"""The queues of an app's broker: which there are, and where the tasks of each lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from celery import Celery

from kombu_delayed.consumer.policy.decisions import ALL_QUEUES
from kombu_delayed.inspection import backlog as backlogs
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.ready.index import ReadyIndex
from kombu_delayed.store.calls.shards import queue_of

from ..errors import QueryError
from ..tasks.results import store_revoked
from ..tasks.task_info import TaskInfo
from . import signals
from .broker import Broker


class Queues(Broker):
    """What the verbs on delayed tasks share: the broker, its queues and their shards."""

    def __init__(self, app: Celery) -> None:
        super().__init__(app)
        #: Finds ready tasks by their ids.
        self.ready_index = ReadyIndex()

    def queues(self) -> list[str]:
        """The app's queues, and all in the broker that have or had something.

        The latter are found by looking at the names of all keys there.
        """
        return sorted({*self.app.amqp.queues, *map(queue_of, backlogs.queues(self.store))})

    @property
    def named(self) -> set[str]:
        """The app's queues, and those to which it gives policies: they may not be used yet."""
        options = self.app.conf.broker_transport_options or {}
        return {*self.app.amqp.queues, *(options.get("delayed_policies") or ())} - {ALL_QUEUES}

    def check_queue(self, queue: str) -> None:
        """Raises QueryError for a queue that the app does not know and that is not in the broker.

        Only for one that the app does not know the names of all keys there are looked at.
        """
        if queue in self.named or queue in (known := self.queues()):
            return
        close = get_close_matches(queue, known, 1)
        advice = f": did you mean {close[0]!r}?" if close else ""
        raise QueryError(f"there is no queue {queue!r}{advice}")

    def shards(self, queue: str | None = None) -> list[str]:
        """What a queue, or all, are made of in the broker: themselves unless they are spread."""
        shards = self.store.shards
        return [name for each in self._names(queue) for name in shards.all(each)]

    def _names(self, queue: str | None) -> list[str]:
        self.store.shards.look_again()
        return [queue] if queue else self.queues()

    def backlog(self, shard: str) -> Backlog:
        """The backlog of one queue, or of one of its shards."""
        return Backlog(self.store, shard)

    def where(
        self, queue: str | None, ids: Sequence[str], found: set[str]
    ) -> Iterator[Sequence[str]]:
        """The shards to look into for some ids: those of a queue, or of each of the app's queues.

        Where some are in none of the app's queues, the others that there are come then.
        """
        shards = self.store.shards
        if queue:
            yield shards.all(queue)
            return
        own = list(self.app.amqp.queues)
        yield from map(shards.all, own)
        if len(found) < len(ids):
            yield from (shards.all(name) for name in self.queues() if name not in own)

    def was_cancelled(self, info: TaskInfo) -> None:
        """Tell the result backend and the signal's receivers of a task that was dropped."""
        store_revoked(self.app, info)
        signals.task_cancelled.send(sender=self.app, info=info)
