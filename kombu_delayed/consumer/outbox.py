"""Keeps what the server has yet to be told: acks in batches, rejects, and freed slots."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby, islice
from operator import itemgetter
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from ..connection import native
from ..store.store import CALL_LIMIT, Store
from .lease.lease import Lease

logger = native.get_logger(__name__)

#: How many recent entries are sent again to a server that may not have received them.
RECENT_LIMIT = 1_000

#: Freed slots wait this long to be sent together with acks, which saves a call per task.
FREE_SECONDS = 0.003

#: The ways to end a message that a consumer holds.
ACK, REQUEUE, RELEASE, GIVE_BACK, BURY = "ack", "requeue", "release", "give back", "bury"


class Done(NamedTuple):
    """A message that its consumer is done with, and what happens to it."""

    verb: str
    queue: str
    tag: int
    id: str
    reason: str = ""


class Freed(NamedTuple):
    """A message whose slots are freed."""

    queue: str
    tag: int


class Held(NamedTuple):
    """A task that holds its unique key for `left_ms` from now on; 0: it has ended.

    If it `goes_on` elsewhere, another worker may have set its time by now: it is not told again.
    """

    queue: str
    key: str
    id: str
    left_ms: int
    goes_on: bool = False

    @property
    def entry(self) -> tuple[str, str, int]:
        """The arguments of the script `hold` for this task."""
        return self.key, self.id, self.left_ms


T = TypeVar("T", Done, Freed, Held)
Each = TypeVar("Each")

_verb_and_queue, _queue = itemgetter(0, 1), itemgetter(0)


def _first_alike(waiting: deque[Each], key: Callable[[Each], Any]) -> list[Each]:
    """The first entries that have the same key, as many as one call takes."""
    # Copy them in one step: a signal handler may change the deque meanwhile.
    first = [*islice(waiting, CALL_LIMIT)]
    for _, alike in groupby(first, key):
        return [*alike]
    return []


def _move(batch: list[T], waiting: deque[T], to: deque[T]) -> None:
    for each in batch:
        with suppress(ValueError):  # a signal handler has flushed it
            waiting.remove(each)  # in one step, so that no other entry goes in its place
            to.append(each)


class Outbox:
    """Entries that a channel has to send to the server. Entries that fail are kept."""

    def __init__(self) -> None:
        self.done: deque[Done] = deque()
        self.freed: deque[Freed] = deque()
        self.held: deque[Held] = deque()
        #: Queue, unique key and id of a task -> what was last said of them.
        self._held_last: OrderedDict[tuple[str, ...], Held] = OrderedDict()
        self._done_lately: deque[Done] = deque(maxlen=RECENT_LIMIT)
        self._freed_lately: deque[Freed] = deque(maxlen=RECENT_LIMIT)
        self._held_lately: deque[Held] = deque(maxlen=RECENT_LIMIT)
        #: The generation of the connection over which everything was sent.
        self.sent_over = 0
        #: When slots in `freed`, if there are any, are sent without waiting for acks.
        self.free_at = 0.0
        #: A signal handler may interrupt a flush with another one.
        self._flushing: Any = threading.RLock()
        self._flush_asked = False

    @property
    def has_any(self) -> bool:
        """Whether anything waits for the next flush."""
        return bool(self.done or self.freed or self.held)

    def free(self, queue: str, tag: int) -> None:
        """Free the slots of a message with the next ack, or soon without one."""
        if not self.freed:
            self.free_at = monotonic() + FREE_SECONDS
        self.freed.append(Freed(queue, tag))

    def hold(self, held: Held) -> None:
        """Set for how long a task holds its key. This replaces what was set before."""
        self._held_last.pop(held[:3], None)  # so that it becomes the newest
        self._held_last[held[:3]] = held
        if len(self._held_last) > RECENT_LIMIT:
            self._held_last.popitem(last=False)
        self.held.append(held)

    def forget(self) -> None:
        """Drop acks, rejects and slots: the server has given their messages to others."""
        self.done.clear()
        self._done_lately.clear()
        self.freed.clear()
        self._freed_lately.clear()

    def flush(self, store: Store, lease: Lease, slots_wait: bool = False) -> None:
        """Send acks, rejects and slots to the server. Entries that fail wait for the next flush.

        With `slots_wait` slots are sent with acks, or at `free_at` if there are none.
        If another thread is flushing, it does this flush, too: a signal handler may have
        interrupted that thread to wait for this one.
        """
        self._flush_asked = True
        flushing = self._flushing  # replaced when the channel ends
        while self._flush_asked and flushing.acquire(blocking=False):
            try:
                self._flush_asked = False
                if (generation := store.run.generation) != self.sent_over:
                    self._send_again(generation)
                if self.held:  # before the acks: a task that is acked early keeps its key
                    self._send_all(self.held, _queue, self._send_held, store, lease)
                if self.done:
                    self._send_all(self.done, _verb_and_queue, self._send_done, store, lease)
                if self.freed and (not slots_wait or monotonic() >= self.free_at):
                    self._send_all(self.freed, _queue, self._send_freed, store, lease)
            finally:
                flushing.release()

    def settle(self, store: Store, lease: Lease) -> None:
        """Flush and wait for the answers. Refused entries are tried once more."""
        for _ in range(2):
            with self._flushing:
                self.flush(store, lease)
            store.run.settle()

    def outlive_channel(self) -> None:
        """Have the keeper's thread send from now on, which shares no lock with greenlets.

        Recent entries are sent again, because the server may not have received them. Entries are
        idempotent.
        """
        self._flushing = native.lock()
        self._send_again(-1)

    @property
    def queues(self) -> set[str]:
        """The queues of messages whose acks and rejects are still to be sent."""
        return {each.queue for each in tuple(self.done)}

    @property
    def tags(self) -> set[int]:
        """The tags of messages whose acks and rejects are waiting, or were sent lately."""
        return {each.tag for each in (*tuple(self.done), *tuple(self._done_lately))}

    def _send_again(self, generation: int) -> None:
        """Send recent entries again: a replica may have become the master without them."""
        self.sent_over = generation
        self.done.extendleft(reversed(self._done_lately))
        self._done_lately.clear()
        self.freed.extendleft(reversed(self._freed_lately))
        self._freed_lately.clear()
        held = [each for each in self._held_lately if not self._last(each).goes_on]
        self.held.extendleft(reversed(held))
        self._held_lately.clear()

    def _send_all(
        self,
        waiting: deque[T],
        key: Callable[[T], Any],
        send: Callable[[Store, Lease, list[T]], None],
        store: Store,
        lease: Lease,
    ) -> None:
        """Send all entries in batches; keep those of queues whose node is down."""
        kept: deque[T] = deque()
        down: set[str] = set()
        try:
            while waiting and (batch := _first_alike(waiting, key)):
                queue = batch[0].queue
                if queue in down:
                    _move(batch, waiting, kept)
                    continue
                try:
                    send(store, lease, batch)
                except store.errors_of_one_queue as error:
                    logger.debug("Cannot send acknowledgements of queue %r now: %s", queue, error)
                    down.add(queue)
        finally:
            waiting.extendleft(reversed(kept))

    def _send_done(self, store: Store, lease: Lease, batch: list[Done]) -> None:
        verb, queue = batch[0][:2]
        tags = [done.tag for done in batch]
        if verb == ACK:
            freed: list[Freed] = []
            if self.freed:
                freed = [each for each in _first_alike(self.freed, _queue) if each.queue == queue]

            def again() -> None:
                self.done.extend(batch)
                self.freed.extend(freed)

            # An ack is idempotent: a message that is not held any more stays as it is.
            store.ack(queue, lease.consumer, tags, again, [tag for _, tag in freed])
            if freed:
                _move(freed, self.freed, self._freed_lately)
        elif verb == BURY:
            rejected = [(done.tag, done.id, done.reason, b"") for done in batch]
            store.bury(queue, lease.consumer, rejected)
        else:
            counted, behind = verb != GIVE_BACK, verb == REQUEUE
            store.release(queue, lease.consumer, tags, counted=counted, behind=behind)
        _move(batch, self.done, self._done_lately)

    def _send_freed(self, store: Store, lease: Lease, batch: list[Freed]) -> None:
        queue, again = batch[0].queue, self.freed.extend
        tags = [tag for _, tag in batch]
        store.free(queue, lease.consumer, tags, on_error=lambda: again(batch))
        _move(batch, self.freed, self._freed_lately)

    def _send_held(self, store: Store, lease: Lease, batch: list[Held]) -> None:
        again = self.held.extend
        held = [self._last(each).entry for each in batch]
        store.leases.hold_keys(batch[0].queue, held, on_error=lambda: again(batch))
        _move(batch, self.held, self._held_lately)

    def _last(self, held: Held) -> Held:
        """Return the newest entry of its task and key. An older one may be sent again after it."""
        return self._held_last.get(held[:3], held)
