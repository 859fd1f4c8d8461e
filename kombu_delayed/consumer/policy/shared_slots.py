"""The slots of global limits that a consumer has: taken before it claims, kept until tasks end."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from kombu_delayed.connection import native
from kombu_delayed.errors import UNREACHABLE
from kombu_delayed.message.ticket import Gate
from kombu_delayed.store.global_limits import Lack, Shared, pool_of, shared
from kombu_delayed.store.scripts import Call
from kombu_delayed.store.store import Store

if TYPE_CHECKING:
    from ..lease.lease import Lease

logger = native.get_logger(__name__)

#: Slots that come back wait so long, for others that do.
BACK_SECONDS = 0.003

#: Slots that were taken for a claim are given back if there was none within this time.
UNUSED_SECONDS = 0.1

#: A limit whose server cannot be reached is tried again after so long.
AGAIN_SECONDS = 1.0


@dataclass
class Pool:
    """What one consumer has of one global limit, by key."""

    queue: str
    #: Its numbers, as the gate of the queue that was claimed last has them.
    numbers: str = ""
    #: Of messages that were claimed and not ended.
    used: Counter[str] = field(default_factory=Counter)
    #: For the next claim of a queue, and since when.
    granted: dict[str, Counter[str]] = field(default_factory=dict)
    granted_at: float = 0.0
    #: For a claim on its way.
    sent: dict[str, Counter[str]] = field(default_factory=dict)
    #: What messages of queues wait for, as their last claims have said.
    lacking: dict[str, Sequence[Lack]] = field(default_factory=dict)
    #: A claim has said so since they were asked for.
    is_new: bool = False
    #: Since when fewer slots are needed than the server knows of; inf: no fewer are.
    less_since: float = math.inf
    told_at: float = 0.0
    again_at: float = -math.inf
    generation: int = -1

    @property
    def held(self) -> Counter[str]:
        """All that may be in use: also by messages of an answer that was lost."""
        found = Counter(self.used)
        for each in (*tuple(self.granted.values()), *tuple(self.sent.values())):
            found.update(each)
        return +found

    def less(self, now: float) -> None:
        """Fewer slots are needed from now on."""
        self.less_since = min(self.less_since, now)


class Owner(Protocol):
    """A consumer's session, as far as it is asked here."""

    lease: Lease
    store: Store
    runs_here: bool


class SharedSlots:
    """The slots of global limits of one consumer.

    The loop calls all but `ended`, `running` and `tell`, which any thread may.
    """

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}
        self._of_messages: dict[int, dict[str, int]] = {}
        self._ended: deque[dict[str, int]] = deque()
        self._number = 0
        self._lock = native.lock()

    # Claims.

    def take(self, queue: str, gate: Gate | None) -> str:
        """Slots for a claim of a queue that is about to be sent, as the script takes them."""
        if gate is None or not gate.global_limits:
            return ""
        text = ""
        for name, numbers in gate.global_limits.items():
            pool = self._pools.get(name)
            if pool is None:
                pool = self._pools[name] = Pool(pool_of(name))
            pool.numbers = numbers
            known = Counter({lack.slot: 0 for lack in pool.lacking.get(queue, ())})
            slots = pool.granted.pop(queue, Counter())
            pool.sent[queue] = pool.sent.get(queue, Counter()) + slots
            known.update(slots)
            text += "".join(f"{slot} {count};" for slot, count in known.items())
        return text

    def occupy(self, tag: int, slots: dict[str, int]) -> None:
        """A message was claimed that has slots until its task has ended."""
        self._of_messages[tag] = slots
        for slot, count in slots.items():
            self._pools[_limit(slot)].used[slot] += count

    def claimed(self, queue: str, lacking: Sequence[Lack] | None = None) -> None:
        """A claim has been answered, and who has got a message occupies its slots.

        `lacking` is what other messages of the queue wait for; None: it is not known.
        """
        now = monotonic()
        for name, pool in self._pools.items():
            if pool.sent.pop(queue, None):
                pool.less(now)
            if lacking is None:
                continue
            pool.lacking.pop(queue, None)  # behind the others, whose turn is before its next one
            if mine := [lack for lack in lacking if _limit(lack.slot) == name]:
                pool.lacking[queue] = mine
                pool.is_new = True

    def has_for(self, queue: str) -> bool:
        """Whether there are slots for the next claim of a queue."""
        return any(queue in pool.granted for pool in self._pools.values())

    def forget_queue(self, queue: str) -> None:
        """It is not consumed any more."""
        for pool in tuple(self._pools.values()):
            pool.lacking.pop(queue, None)
            if pool.granted.pop(queue, None):
                pool.less(monotonic())

    # The ends of tasks.

    def ended(self, tag: int) -> bool:
        """The slots of a message come back; returns whether it had some."""
        slots = self._of_messages.pop(tag, None)
        if slots:
            self._ended.append(slots)
        return bool(slots)

    def _drain(self, now: float) -> None:
        while self._ended:
            for slot, count in self._ended.popleft().items():
                pool = self._pools[_limit(slot)]
                pool.used[slot] -= count
                if pool.used[slot] <= 0:
                    del pool.used[slot]
                pool.less(now)

    def pools_of(self, tag: int) -> list[str]:
        """Where the slots of a message are kept."""
        return [self._pools[_limit(slot)].queue for slot in self._of_messages.get(tag, ())]

    def running(self, queue: str) -> list[str]:
        """What stays of a limit when its consumer leaves, as its server names it."""
        found = [pool for pool in tuple(self._pools.values()) if pool.queue == queue]
        held = [slot for pool in found for slot in pool.used if pool.used[slot] > 0]
        return ["", *held] if held else []

    def forget(self) -> None:
        """All of them belong to others now."""
        self._pools.clear()
        self._of_messages.clear()
        self._ended.clear()

    # What is told to the servers of the limits.

    def next_at(self, owner: Owner, room: int) -> float:
        """When `step` has something to do, by the monotonic clock."""
        times = (self._due_at(pool, owner, room) for pool in tuple(self._pools.values()))
        return min(times, default=math.inf)

    def _due_at(self, pool: Pool, owner: Owner, room: int) -> float:
        wants = room > 0 and bool(pool.lacking)
        if wants and pool.is_new:
            return pool.again_at
        # Others may wait for them; where more are wanted here, one call does both.
        at = pool.less_since if wants or owner.runs_here else pool.less_since + BACK_SECONDS
        if pool.granted:
            at = min(at, pool.granted_at + UNUSED_SECONDS)
        if pool.used:  # a server may have lost what it was told
            is_other = pool.generation != owner.store.run.generation
            at = min(at, -math.inf if is_other else pool.told_at + owner.lease.seconds / 3)
        return max(at, pool.again_at)

    def step(
        self, owner: Owner, room: int, ready: Callable[[str], bool], only: str | None = None
    ) -> None:
        """Give back what is not needed, and take slots for `room` messages that wait.

        `ready` makes a queue of this consumer claim; it returns whether it is one. With `only` it
        takes slots for no other queue.
        """
        if not self._pools:
            return
        now, lease = monotonic(), owner.lease
        self._drain(now)
        due = [pool for pool in self._pools.values() if self._due_at(pool, owner, room) <= now]
        if not due or lease.lost:
            return
        for pool in due:
            pool.granted.clear()
            if only is not None:
                pool.lacking = {name: each for name, each in pool.lacking.items() if name == only}
        asked = lease.clock()
        calls = [
            self._call(owner.store, lease.consumer, lease.ms, pool, room, lease.holds(pool.queue))
            for pool in due
        ]
        try:
            answers = owner.store.together(calls)
        except UNREACHABLE as error:
            answers = [error] * len(calls)
        for pool, answer in zip(due, answers, strict=True):
            if isinstance(answer, UNREACHABLE):
                pool.again_at = now + AGAIN_SECONDS
                logger.info("Messages wait, as a limit cannot be asked now: %s", answer)
                continue
            if isinstance(answer, BaseException):
                raise answer
            self._heard(owner, pool, shared(answer), asked, ready)

    def _call(
        self, store: Store, consumer: str, lease_ms: int, pool: Pool, most: int, leased: bool
    ) -> Call:
        with self._lock:
            self._number += 1
            number = self._number
        pool.less_since, pool.is_new, pool.told_at = math.inf, False, monotonic()
        pool.generation = store.run.generation
        return store.global_limits.share_call(
            pool.queue,
            consumer,
            number,
            pool.numbers,
            pool.held,
            pool.lacking if most > 0 else {},
            most=max(most, 0),
            lease_ms=lease_ms,
            leased=leased,
        )

    def _heard(
        self,
        owner: Owner,
        pool: Pool,
        answer: Shared | None,
        asked: float,
        ready: Callable[[str], bool],
    ) -> None:
        lease = owner.lease
        if answer is None:
            again = lambda: self._again(owner, pool)  # noqa: E731
            answer = lease.outlast_data(pool.queue, owner.store, again)
            pool.is_new = True  # it has asked for nothing
        if answer is None:
            lease.lost = True
            return
        lease.grant(pool.queue, (asked, -math.inf))
        costs = {
            (queue, lack.slot): lack.cost for queue in pool.lacking for lack in pool.lacking[queue]
        }
        for (queue, slot), count in answer.granted.items():
            pool.granted.setdefault(queue, Counter())[slot] += count * costs[queue, slot]
            pool.granted_at = monotonic()
            ready(queue)
        for queue in answer.called:
            if not ready(queue):
                owner.store.global_limits.call(queue)

    def _again(self, owner: Owner, pool: Pool) -> Shared | None:
        lease = owner.lease
        move, given = self._call(owner.store, lease.consumer, lease.ms, pool, 0, False)
        return shared(move(owner.store.run, **given))

    def tell(self, store: Store, consumer: str, lease_ms: int, queue: str = "") -> None:
        """Say what running tasks have, as the loop claims no more: of all limits, or of one."""
        self._drain(monotonic())
        for pool in tuple(self._pools.values()):
            if pool.told_at and queue in ("", pool.queue):
                try:
                    self._tell(store, consumer, lease_ms, pool)
                except store.errors_of_one_queue as error:
                    logger.info("Slots of a limit come back when its node does: %s", error)

    def _tell(self, store: Store, consumer: str, lease_ms: int, pool: Pool) -> None:
        pool.granted.clear()
        pool.sent.clear()
        move, given = self._call(store, consumer, lease_ms, pool, 0, True)
        answer = shared(move(store.run, **given))
        for each in answer.called if answer else ():
            store.global_limits.call(each)


def _limit(slot: str) -> str:
    return slot.partition(":")[0]
