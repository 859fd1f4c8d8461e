"""The queues of an app's broker, the shards that hold their tasks, and how tasks are routed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import wraps
from math import inf
from time import monotonic
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from celery import Celery
from celery.utils.log import get_logger

from kombu_delayed.consumer.policy.decisions import ALL_QUEUES
from kombu_delayed.inspection import backlog as backlogs
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.ready.index import ReadyIndex
from kombu_delayed.store.calls.shards import queue_of

from ..errors import QueryError
from ..tasks.query import ids_of
from ..tasks.results import keeps_results, store_revoked
from ..tasks.task_info import TaskInfo
from . import signals
from .broker import Broker

logger = get_logger(__name__)

#: How often an app's tasks are checked for result backends.
LOOK_SECONDS = 1.0

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Searched")


class Searched(Protocol):
    """The queues of a broker, or an object that reads them."""

    @property
    def errors_of_one_queue(self) -> tuple[type[BaseException], ...]:
        """The errors of a call after which other queues can be used."""

    def reachable(self: S) -> S | None:
        """A copy without the nodes of a Cluster that do not answer, or None if all answer."""


class Queues(Broker):
    """The common base of the verbs on delayed tasks: the broker, its queues and their shards."""

    def __init__(self, app: Celery) -> None:
        super().__init__(app)
        #: Finds ready tasks by their ids.
        self.ready_index = ReadyIndex()
        self._keeps_results = False
        self._look_again_at = -inf

    def queues(self) -> list[str]:
        """The app's queues, and all queues of the broker that have or had something in them.

        The latter are found by scanning the names of all keys.
        """
        found = backlogs.queues(self.store)
        self.store.shards.seen(found)
        names = {*own_queues(self.app), *map(queue_of, found)}
        return sorted(self.store.shards.among(names))

    @property
    def named(self) -> set[str]:
        """The app's queues, and those with policies, which may not be in use yet."""
        options = self.app.conf.broker_transport_options or {}
        return {*own_queues(self.app), *(options.get("delayed_policies") or ())} - {ALL_QUEUES}

    def also_unused(self) -> list[str]:
        """All queues, and those for which this app only declares policies so far."""
        return sorted(self.store.shards.among({*self.queues(), *self.named}))

    def check_queue(self, queue: str) -> None:
        """Raises QueryError for a queue that neither the app nor the broker knows.

        The names of all keys are scanned only for a queue that the app does not know.
        """
        if queue in self.named or queue in (known := self.queues()):
            return
        close = get_close_matches(queue, known, 1)
        advice = f": did you mean {close[0]!r}?" if close else ""
        raise QueryError(f"there is no queue {queue!r}{advice}")

    def shards(self, queue: str | None = None) -> list[str]:
        """The shards of one queue or of all. A queue that is not spread is its own only shard."""
        shards = self.store.shards
        return [name for each in self._names(queue) for name in shards.all(each)]

    def _names(self, queue: str | None, also_unused: bool = False) -> list[str]:
        every = self.also_unused if also_unused else self.queues
        names = [queue] if queue else every()
        self.store.shards.look_at_all(names)
        return names

    def backlog(self, shard: str) -> Backlog:
        """The backlog of one queue, or of one of its shards."""
        return Backlog(self.store, shard)

    def where(
        self, queue: str | None, ids: Sequence[str], found: set[str]
    ) -> Iterator[Sequence[str]]:
        """The shards to search for some ids: those of a queue, or of each of the app's queues.

        The caller adds to `found` the ids that it has found. If some are in none of the app's
        queues, the other queues of the broker follow. Raises QueryError for an invalid id.
        """
        shards = self.store.shards
        ids = ids_of(ids)
        if queue:
            yield from filter(None, [shards.all(queue)])
            return
        own = list(self.app.amqp.queues)
        yield from filter(None, map(shards.all, own))
        if len(found) < len(ids):
            others = [name for name in self.queues() if name not in own]
            yield from filter(None, map(shards.all, others))

    def reports_cancelled(self) -> bool:
        """Returns whether receivers, events or a result backend are notified of cancelled tasks.

        The app's tasks, which may be many, are checked for result backends once a second.
        """
        if signals.task_cancelled.receivers or self.app.conf.task_send_sent_event:
            return True
        if monotonic() >= self._look_again_at:
            self._keeps_results = keeps_results(self.app)
            self._look_again_at = monotonic() + LOOK_SECONDS
        return self._keeps_results

    def was_cancelled(self, info: TaskInfo) -> None:
        """Notify the result backend, event consumers and signal receivers of a dropped task."""
        store_revoked(self.app, info)
        signals.task_cancelled.send(sender=self.app, info=info)


def despite_nodes_down(
    search: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], T]:
    """Let a search cover all queues, or only those on the nodes of a Cluster that answer.

    If nothing is found, the error of a node that does not answer is raised.
    """

    @wraps(search)
    def searching(queues: S, /, *given: P.args, **named: P.kwargs) -> T:
        try:
            return search(queues, *given, **named)
        except queues.errors_of_one_queue as error:
            rest = queues.reachable()
            if rest is None or not (found := search(rest, *given, **named)):
                raise
            logger.warning("Not all queues could be searched: %s", error)
            return found

    return searching


def own_queues(app: Celery) -> list[str]:
    """The queues of an app, except those of fanout exchanges, where no message waits."""
    queues = list(app.amqp.queues.items())  # other threads may add some
    return [name for name, each in queues if each.exchange.type != "fanout"]


def routed_queue(
    app: Celery, name: str, args: Any = (), kwargs: Any = None, queue: str | None = None
) -> str:
    """The queue that a task is sent to, or "" if it is sent to an exchange of its own."""
    options = {"queue": queue} if queue else {}
    task = app.tasks.get(name)
    if task is not None:
        options = {**task._get_exec_options(), **options}
    found = app.amqp.router.route(options, name, args, kwargs or {})
    target = found.get("queue")
    return str(getattr(target, "name", target) or "")
