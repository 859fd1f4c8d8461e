"""The slots of global limits that a consumer has: taken before it claims, kept until tasks end."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from kombu_delayed.connection import native
from kombu_delayed.errors import UNREACHABLE
from kombu_delayed.message.ticket import Gate
from kombu_delayed.store.calls.scripts import Call
from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.global_limits import GlobalLimits, Lack, Shared, pool_of, shared
from kombu_delayed.store.store import Store

if TYPE_CHECKING:
    from ..lease.lease import Lease

logger = native.get_logger(__name__)

#: Freed slots wait this long, to be sent together with others.
BACK_SECONDS = 0.003

#: Slots that were taken for a claim are given back if there was no claim within this time.
UNUSED_SECONDS = 0.1

#: A limit whose server cannot be reached is tried again after this time.
AGAIN_SECONDS = 1.0

#: The numbers of the loop's calls rise by this; those of the keeper's thread come between two.
STEP = 1_000


@dataclass
class Pool:
    """The slots that one consumer has of one global limit, by key."""

    queue: str
    #: Its numbers, from the gate of the queue that was claimed from last.
    numbers: str = ""
    #: Slots of messages that were claimed and have not ended.
    used: Counter[str] = field(default_factory=Counter)
    #: Slots for the next claims of a queue's shards, by its name, and since when.
    granted: dict[str, Counter[str]] = field(default_factory=dict)
    granted_at: float = 0.0
    #: Slots for a shard's claim that is in flight, and of no message that is known here.
    sent: dict[str, Counter[str]] = field(default_factory=dict)
    #: The slots that messages wait for, by queue, according to the last claims.
    lacking: dict[str, Sequence[Lack]] = field(default_factory=dict)
    #: Whether a claim has said so since slots were asked for.
    is_new: bool = False
    #: Since when fewer slots are needed than the server knows of; inf if no fewer are.
    less_since: float = math.inf
    reported_at: float = 0.0
    again_at: float = -math.inf
    generation: int = -1
    #: The slots the server knows of, and by which call; None: a call is in flight, or was lost.
    known: tuple[int, Counter[str]] | None = None
    #: The slots that the keeper's thread has taken back since, because the loop is stuck.
    taken_back: Counter[str] = field(default_factory=Counter)

    @property
    def held(self) -> Counter[str]:
        """All slots that may be in use, also by messages of a lost answer."""
        found = Counter(self.used)
        for each in (*tuple(self.granted.values()), *tuple(self.sent.values())):
            found.update(each)
        return +found

    def send(self, queue: str, want: int) -> Counter[str]:
        """The slots for a claim of at most `want` messages; 0 of those not granted to them."""
        granted, slots = self.granted.get(queue_of(queue), Counter()), Counter[str]()
        for slot, cost, messages in self.lacking.get(queue, ()):
            slots[slot] = cost * min(want, messages, granted[slot] // cost)
            granted[slot] -= slots[slot]
        self.sent[queue] = self.sent.get(queue, Counter()) + slots
        return slots

    def less(self, now: float) -> None:
        """Note that fewer slots are needed from now on."""
        self.less_since = min(self.less_since, now)

    def failed(self, now: float) -> None:
        """Make the last call again soon, because it is unknown whether it was carried out."""
        self.again_at = now + AGAIN_SECONDS
        self.is_new = True
        self.less(now)


class Owner(Protocol):
    """The part of a consumer's session that is used here."""

    lease: Lease
    store: Store
    runs_here: bool


class SharedSlots:
    """The slots of global limits of one consumer.

    `ended`, `running` and `report` are safe from any thread, and the keeper's thread has its own
    calls for while the loop is stuck. Only the loop may call the rest.
    """

    def __init__(self) -> None:
        #: By the names of limits, as in slots. Empty: this consumer has no global limits.
        self.pools: dict[str, Pool] = {}
        self._of_messages: dict[int, dict[str, int]] = {}
        self._ended: deque[dict[str, int]] = deque()
        self._number = 0

    # Claims.

    def take(self, queue: str, gate: Gate, want: int) -> str:
        """The slots for a claim that is about to be sent, in the form that the script takes."""
        text = ""
        for name, numbers in gate.global_limits.items():
            pool = self._pool(name)
            pool.numbers = numbers
            slots = pool.send(queue, want)
            text += "".join(f"{slot} {count};" for slot, count in slots.items())
        return text

    def _pool(self, name: str) -> Pool:
        pool = self.pools.get(name)
        if pool is None:
            pool = self.pools[name] = Pool(pool_of(name))
        return pool

    def occupy(self, tag: int, queue: str, slots: dict[str, int]) -> None:
        """Note that a message was claimed that has slots until its task has ended."""
        if tag in self._of_messages:  # it was let in, and its claim has failed afterwards
            return
        self._of_messages[tag] = slots
        for slot, count in slots.items():
            pool = self._pool(_limit(slot))
            pool.used[slot] += count
            if queue in pool.sent:
                pool.sent[queue][slot] -= count

    def claimed(self, queue: str, lacking: Sequence[Lack] | None = None) -> None:
        """Note that a claim was answered, after its messages have occupied their slots.

        `lacking` is what other messages of the queue wait for; None if it is not known.
        """
        for name, pool in self.pools.items():
            if left := +pool.sent.pop(queue, Counter()):
                pool.granted.setdefault(queue_of(queue), Counter()).update(left)
                pool.less(monotonic())
            if lacking is None:
                continue
            pool.lacking.pop(queue, None)  # it goes behind the others, whose turn is next
            if mine := [lack for lack in lacking if _limit(lack.slot) == name]:
                pool.lacking[queue] = mine
                pool.is_new = True

    def has_for(self, queue: str) -> bool:
        """Whether there are slots for the next claim of a queue."""
        name = queue_of(queue)
        return any(+pool.granted.get(name, Counter()) for pool in self.pools.values())

    def forget_queue(self, queue: str) -> None:
        """Forget a queue that is not consumed any more."""
        for pool in tuple(self.pools.values()):
            pool.lacking.pop(queue, None)
            if pool.granted:
                pool.less(monotonic())

    # The ends of tasks.

    def ended(self, tag: int) -> dict[str, int]:
        """Free the slots of a message; returns them."""
        ended = self._ended  # replaced if all is forgotten meanwhile
        slots = self._of_messages.pop(tag, None)
        if slots:
            ended.append(slots)
        return slots or {}

    def take_over(self, tag: int) -> None:
        """As `ended`, for the keeper's thread, which tells the servers if the loop is stuck."""
        for slot, count in self.ended(tag).items():
            self._pool(_limit(slot)).taken_back[slot] += count

    def _drain(self, now: float) -> None:
        while self._ended:
            for slot, count in self._ended.popleft().items():
                pool = self._pool(_limit(slot))
                pool.used[slot] -= count
                if pool.used[slot] <= 0:
                    del pool.used[slot]
                pool.less(now)

    def pools_of(self, tag: int) -> list[str]:
        """Where the slots of a message are kept."""
        return [self.pools[_limit(slot)].queue for slot in self._of_messages.get(tag, ())]

    def running(self, queue: str) -> list[str]:
        """The slots of a limit that stay when the consumer leaves, as its server names them."""
        found = [pool for pool in tuple(self.pools.values()) if pool.queue == queue]
        held = [slot for pool in found for slot in pool.used if pool.used[slot] > 0]
        return ["", *held] if held else []

    def leave_with(self, tags: Collection[int]) -> None:
        """Leave: of the consumer's messages, only the tasks of those in `tags` keep running."""
        for tag in tuple(self._of_messages):
            if tag not in tags:
                self.ended(tag)
        self._drain(monotonic())

    def forget(self) -> None:
        """Forget all slots, because they belong to others now."""
        self._of_messages.clear()
        self._ended = deque()
        self.pools.clear()

    # Calls to the servers of the limits.

    def next_at(self, owner: Owner, room: int) -> float:
        """When `step` has something to do, by the monotonic clock."""
        times = (self._due_at(pool, owner, room) for pool in tuple(self.pools.values()))
        return min(times, default=math.inf)

    def _due_at(self, pool: Pool, owner: Owner, room: int) -> float:
        wants = room > 0 and bool(pool.lacking)
        if wants and pool.is_new:
            return pool.again_at
        # Others may wait for freed slots; if more are wanted here, one call does both.
        at = pool.less_since if wants or owner.runs_here else pool.less_since + BACK_SECONDS
        if pool.granted:
            at = min(at, pool.granted_at + UNUSED_SECONDS)
        if pool.used:  # a server may have lost what was reported
            is_other = pool.generation != owner.store.run.generation
            at = min(at, -math.inf if is_other else pool.reported_at + owner.lease.seconds / 3)
        return max(at, pool.again_at)

    def step(
        self, owner: Owner, room: int, ready: Callable[[str], bool], only: str | None = None
    ) -> None:
        """Give back slots that are not needed, and take slots for `room` messages that wait.

        `ready` has this consumer claim from a queue, and returns whether it does. With `only`,
        slots are taken for no other queue.
        """
        now, lease = monotonic(), owner.lease
        self._drain(now)
        due = [pool for pool in self.pools.values() if self._due_at(pool, owner, room) <= now]
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
        except BaseException as error:
            answers = [error] * len(calls)
        for pool, (_, given), answer in zip(due, calls, answers, strict=True):
            try:
                if isinstance(answer, BaseException):
                    raise answer
                self._heard(owner, pool, given["number"], shared(answer), asked, ready)
            except UNREACHABLE as error:
                pool.failed(now)
                logger.info("Messages wait, as a limit cannot be asked now: %s", error)
            except BaseException:
                for each in due:
                    each.failed(now)
                raise

    def _call(
        self, store: Store, consumer: str, lease_ms: int, pool: Pool, most: int, leased: bool
    ) -> Call:
        self._number += STEP
        pool.known, pool.taken_back = None, Counter()
        pool.less_since, pool.is_new, pool.reported_at = math.inf, False, monotonic()
        pool.generation = store.run.generation
        return GlobalLimits(store).share_call(
            pool.queue,
            consumer,
            self._number,
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
        number: int,
        answer: Shared | None,
        asked: float,
        ready: Callable[[str], bool],
    ) -> None:
        lease = owner.lease
        if answer is None:
            again = lambda: self._again(owner, pool)  # noqa: E731
            answer = lease.outlast_data(pool.queue, owner.store, again)
            number = self._number
            pool.is_new = True  # that call has asked for no slots
        if answer is None:
            lease.lost = True
            return
        lease.grant(pool.queue, (asked, -math.inf))
        costs = {
            (queue, lack.slot): lack.cost for queue in pool.lacking for lack in pool.lacking[queue]
        }
        for (queue, slot), count in answer.granted.items():
            if (queue, slot) not in costs:  # a signal handler has cancelled the queue meanwhile
                pool.less(monotonic())
                continue
            granted = pool.granted.setdefault(queue_of(queue), Counter())
            granted[slot] += count * costs[queue, slot]
            pool.granted_at = monotonic()
            ready(queue)
        pool.known = number, pool.held
        _call_all(owner.store, [queue for queue in answer.called if not ready(queue)])

    def _again(self, owner: Owner, pool: Pool) -> Shared | None:
        lease = owner.lease
        move, given = self._call(owner.store, lease.consumer, lease.ms, pool, 0, False)
        return shared(move(owner.store.run, **given))

    def report_taken_back(self, store: Store, consumer: str, lease_ms: int) -> None:
        """Give back the slots that `take_over` has taken, in the thread that called it.

        The loop may continue at any time. Its next call has a higher number, and is the valid one.
        """
        for pool in tuple(self.pools.values()):
            known, taken = pool.known, pool.taken_back
            if known is None or not taken:
                continue
            number, held = known[0] + 1, known[1] - taken
            move, given = GlobalLimits(store).share_call(
                pool.queue,
                consumer,
                number,
                pool.numbers,
                held,
                {},
                most=0,
                lease_ms=lease_ms,
                leased=True,
            )
            answer = shared(move(store.run, **given))
            if pool.known is known:
                pool.known, pool.taken_back = (number, held), Counter()
            _call_all(store, answer.called if answer else ())

    def report(self, store: Store, consumer: str, lease_ms: int, queue: str = "") -> None:
        """Report the slots of running tasks, of all limits or of one, after the loop has ended."""
        self._drain(monotonic())
        for pool in tuple(self.pools.values()):
            if pool.reported_at and queue in ("", pool.queue):
                try:
                    self._report(store, consumer, lease_ms, pool)
                except store.errors_of_one_queue as error:
                    logger.info("Slots of a limit come back when its node does: %s", error)

    def _report(self, store: Store, consumer: str, lease_ms: int, pool: Pool) -> None:
        pool.granted.clear()
        pool.sent.clear()
        move, given = self._call(store, consumer, lease_ms, pool, 0, True)
        answer = shared(move(store.run, **given))
        _call_all(store, answer.called if answer else ())


def _call_all(store: Store, queues: Sequence[str]) -> None:
    """Have consumers of these queues claim. If one cannot be told, the queue is polled in 1 s."""
    for queue in queues:
        with suppress(*UNREACHABLE):
            GlobalLimits(store).call(queue)


def _limit(slot: str) -> str:
    return slot.partition(":")[0]
