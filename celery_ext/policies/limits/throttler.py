"""Policies that depend on the tasks that are running."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from kombu_delayed.consumer.policy.decisions import Decision
from kombu_delayed.inspection.gate_usage import Holder, parts_of
from kombu_delayed.message.ticket import LimitNumbers, Ticket, Use, slot_name

from ...tasks.history import worker_name
from ..message import Message
from .gated import Declared, Gated, with_uses

_TASK, _TENANT = "running task", "running tenant"

#: How many running tasks a throttler sees at most, and for how long it sees the same ones.
TASKS_LIMIT, TASKS_SECONDS = 1_000, 1.0


@dataclass(frozen=True)
class RunningTask:
    """A task that runs, or that a worker has claimed and is about to run.

    `since_ms` is when it was claimed, by the server's clock. If an older version claimed it, `id`
    is empty and `since_ms` is None. `keys` and `weights` are by name of the limits in which it
    holds slots; a long key is shown as its digest.
    """

    id: str
    task: str
    queue: str
    tenant: str | None
    worker: str
    since_ms: int | None
    keys: Mapping[str, str]
    weights: Mapping[str, int]

    @classmethod
    def of(cls, queue: str, holder: Holder) -> RunningTask:
        """Return a running task, given what the gate has of it."""
        uses = {parts_of(name): cost for name, cost in holder.slots.items()}
        keys = dict([*uses])
        weights = {
            limit: cost for (limit, _), cost in uses.items() if limit not in (_TASK, _TENANT)
        }
        return cls(
            holder.id,
            keys.pop(_TASK, ""),
            queue,
            keys.pop(_TENANT, "") or None,
            worker_name(holder.consumer),
            holder.since_ms,
            keys,
            weights,
        )


class Running:
    """The running tasks of a queue across all workers, without the message itself."""

    def __init__(
        self,
        slots: Mapping[str, int],
        own: Mapping[str, int] | None = None,
        tasks: Callable[[], Sequence[RunningTask]] = tuple,
    ) -> None:
        self._tasks = tasks
        counts = dict(slots)
        for name, count in (own or {}).items():
            counts[name] = max(counts.get(name, 0) - count, 0)
        self._counts = counts

    @property
    def total(self) -> int:
        """How many tasks are running."""
        prefix = slot_name(_TASK)
        return sum(count for name, count in self._counts.items() if name.startswith(prefix))

    def of_task(self, name: str) -> int:
        """How many tasks with this name are running."""
        return self._counts.get(slot_name(_TASK, name), 0)

    def of_tenant(self, tenant: str) -> int:
        """How many tasks of this tenant are running."""
        return self._counts.get(slot_name(_TENANT, tenant), 0)

    def of_limit(self, name: str, key: str = "") -> int:
        """Slots of a `Limit` of the queue in use by a key."""
        return self._counts.get(slot_name(name, key), 0)

    def tasks(self) -> Sequence[RunningTask]:
        """The running tasks, at most a thousand, as of at most one second ago."""
        return self._tasks()


class Throttler(Gated):
    """Base class of policies that decide by the tasks that are running.

    A subclass has `decide(message, running)`. A message that it delays holds no slots.
    """

    @abstractmethod
    def decide(self, message: Message, running: Running) -> Decision:  # type: ignore[override]
        """Return Run, Delay, Drop or Bury for a message."""

    def _asked(self, message: Message) -> Decision:
        def others() -> list[RunningTask]:
            return [each for each in self._seen(message) if each.id != message.id]

        return self.decide(message, Running(message.running(), message.own_slots(), others))

    def _seen(self, message: Message) -> list[RunningTask]:
        # Not from `__init__`: a user's subclass may have its own without calling this one.
        known: dict[str, tuple[float, list[RunningTask]]] = vars(self).get("_known", {})
        queue, now = message.queue, monotonic()
        if queue not in known or now >= known[queue][0]:
            known = {name: each for name, each in known.items() if now < each[0]}
            found = [RunningTask.of(queue, each) for each in message.holders(TASKS_LIMIT)]
            known[queue] = now + TASKS_SECONDS, found
            vars(self)["_known"] = known
        return known[queue][1]

    def limits(self, owner: str) -> Iterable[LimitNumbers]:
        return LimitNumbers(_TASK, -1), LimitNumbers(_TENANT, -1)

    def declared(self, owner: str) -> Iterable[Declared]:
        yield Declared(_TASK, "throttler", owner, "task")
        yield Declared(_TENANT, "throttler", owner, "tenant", is_of_tenants=True)

    def stamp(self, ticket: Ticket, message: Message, owner: str) -> Ticket:
        """Count the message, once."""
        uses = Use(_TASK, message.task), Use(_TENANT, message.tenant or "")
        return with_uses(ticket, *[use for use in uses if use not in ticket.uses])
