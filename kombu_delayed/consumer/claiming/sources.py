"""The state of a consumer's queues and their server, and which queues have something to do.

A consumer may have a thousand queues. Each step visits only those that have something to do.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from itertools import count
from operator import attrgetter
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from kombu.utils.scheduling import priority_cycle

from kombu_delayed.store.calls.shards import queue_of

from ..policy.admission import Claimed

if TYPE_CHECKING:
    from kombu_delayed.store.claimable import Delivered

#: Claims from more queues than this travel together. Claims that are sent one by one can each use
#: the room that the one before has left.
FEW_QUEUES = 4

#: A consumer that finds messages without a token, from a stock producer, polls this often.
EAGER_POLL_SECONDS = 0.1

#: All consumers of a queue together poll about this often, however many they are.
SHARED_POLL_SECONDS = 1.0

#: A poll comes at a random time between this fraction of its interval and the whole of it.
POLL_JITTER = 0.7

#: A poll includes polls that would come within this fraction of their intervals, so that over time
#: all of them travel together.
POLL_EARLY = 0.5

#: A queue that is moving to another node is tried again after this time.
MOVING_SECONDS = 0.05

#: A queue with limits that this consumer does not declare is tried again after this time.
REFUSED_SECONDS = 5.0

#: A claim that came slightly too early is repeated after at least this time.
CLOCK_GRAIN_MS = 0.3


#: In place of an expiry: the queue deletes itself when no worker consumes it.
AUTO_DELETE = -1

#: A larger step between the server's clock and ours means that one of them was set.
CLOCK_JUMP_MS = 20

#: How far the two clocks run apart in a second.
CLOCK_DRIFT_MS = 0.2

_claimed_at = attrgetter("claimed_at")


class ServerClock:
    """Estimates the server's time from its answers."""

    def __init__(self) -> None:
        self._ahead_ms = -math.inf
        self._compared_at = 0.0

    def now_ms(self) -> float:
        """The server's time; before the first answer it is this machine's."""
        # Messages may come before it: those of a lost answer, or of a queue that has moved.
        found = monotonic() * 1000 + self._ahead_ms
        return found if math.isfinite(found) else time() * 1000

    def compare(self, server_ms: int, asked_at: float) -> None:
        """Note the server's time in an answer to a call that was sent at `asked_at`.

        It arrives late, in whole ms, so the most advanced is nearest.
        """
        now = monotonic()
        ahead_ms = server_ms - now * 1000
        known_ms = self._ahead_ms - (now - self._compared_at) * CLOCK_DRIFT_MS
        # An answer that was long under way also comes with an older time.
        set_back = known_ms - (server_ms + 1 - asked_at * 1000) > CLOCK_JUMP_MS
        self._ahead_ms = ahead_ms if set_back else max(known_ms, ahead_ms)
        self._compared_at = now


class Buffer(deque[Claimed]):
    """Messages that were claimed and not handed out.

    A signal handler may take from it at any time, and the keeper's thread from its end.
    """

    def take_out(self, entry: Claimed) -> bool:
        """Remove `entry` from the front; returns False if it was given back meanwhile."""
        with suppress(IndexError):  # the keeper's thread has taken it meanwhile
            first = self.popleft()
            if first is entry:
                return True
            self.appendleft(first)  # one of a queue without acks, which that thread leaves here
        return False

    def take_out_of(self, queue: str) -> list[Claimed]:
        """Remove the messages of a queue from the buffer, and return them."""
        taken: list[Claimed] = []
        with suppress(IndexError):  # another thread takes from its end
            for _ in range(len(self)):
                entry = self.popleft()
                (taken if entry.queue == queue else self).append(entry)
        return taken

    def take_all(self) -> list[Claimed]:
        """Take out all entries, the last first. Safe from any thread: the loop takes the first."""
        taken: list[Claimed] = []
        with suppress(IndexError):
            while True:
                taken.append(self.pop())
        return taken


class Source:
    """The state of one queue in one consumer. Times are of the monotonic clock."""

    def __init__(self, queue: str, no_ack: bool = False, expires_ms: int = 0) -> None:
        self.queue = queue
        #: The queue of which this one is a shard, or itself.
        self.whole = queue_of(queue)
        self.no_ack = no_ack
        self.expires_ms = expires_ms
        self.poll_seconds = 1.0
        self.claimed_at = -math.inf
        #: When it was last known not to be paused; a claim says so as well.
        self.checked_at = -math.inf
        #: How many consumers it has, as far as is known here.
        self.consumers = 1
        #: Whether a poll has found messages that no token had announced.
        self.found = False
        #: When another consumer has promised to claim: no need to poll before.
        self.promised_at = -math.inf
        self._agenda = Agenda()
        self.ready = True
        self._due_at = self._poll_at = math.inf

    def file_in(self, agenda: Agenda) -> None:
        """Keep an agenda up to date from now on."""
        ready, owes = self.ready, self.owes
        self._agenda = agenda
        self.ready, self.owes = ready, owes
        self.due_at, self.poll_at = self._due_at, self._poll_at

    @property
    def ready(self) -> bool:
        """Whether there may be something to claim."""
        return self.queue in self._agenda.ready

    @ready.setter
    def ready(self, ready: bool) -> None:
        if ready:
            self._agenda.ready[self.queue] = self
        else:
            self._agenda.ready.pop(self.queue, None)

    @property
    def owes(self) -> bool:
        """Whether a token was taken, or a promise is due, and must be followed or passed on."""
        return self.queue in self._agenda.owing

    @owes.setter
    def owes(self, owes: bool) -> None:
        if owes:
            self._agenda.owing[self.queue] = self
        else:
            self._agenda.owing.pop(self.queue, None)

    @property
    def due_at(self) -> float:
        """When this consumer has promised to claim."""
        return self._due_at

    @due_at.setter
    def due_at(self, at: float) -> None:
        self._due_at = at
        self._agenda.due.put(self, at)

    @property
    def poll_at(self) -> float:
        """When to poll for messages that no token has announced."""
        return self._poll_at

    @poll_at.setter
    def poll_at(self, at: float) -> None:
        self._poll_at = at
        (self._agenda.kept if self.expires_ms > 0 else self._agenda.polls).put(self, at)

    def claim_anew(self) -> None:
        """Claim, or let others, because a token may have been lost."""
        self.ready = self.owes = True
        self.promised_at = -math.inf
        self.poll_at = self._poll_at  # a step that failed may have taken it off the agenda

    def token(self, in_ms: float, now: float) -> None:
        """Take a wake token: claim at once, or when its time has come."""
        if in_ms <= 0:
            self._agenda.ready[self.queue] = self._agenda.owing[self.queue] = self
        else:
            self.due_at = min(self.due_at, now + in_ms / 1000)

    def answered(
        self, answer: Delivered, now: float, clock: ServerClock, poll_seconds: float
    ) -> None:
        """Remember the answer of a claim."""
        ready, queue = self._agenda.ready, self.queue
        unexpected = bool(answer.records) and (self.found or queue not in ready)
        if answer.more:
            ready[queue] = self
        else:
            ready.pop(queue, None)
        self._agenda.owing.pop(queue, None)
        self.found = False
        self.promised_at = -math.inf
        due_at = math.inf
        if answer.next_due_ms:
            soonest_ms = CLOCK_GRAIN_MS if answer.next_due_ms > answer.now_ms else 0
            due_at = now + max(answer.next_due_ms - clock.now_ms(), soonest_ms) / 1000
        due_at = now + REFUSED_SECONDS if answer.refused else due_at
        if due_at != self._due_at:  # mostly it stays infinite
            self.due_at = due_at
        self.consumers = answer.consumers
        self.plan_poll(unexpected, now, poll_seconds)

    def plan_poll(self, unexpected: bool, now: float, poll_seconds: float) -> None:
        """Plan the next poll: soon after something unexpected, otherwise later each time."""
        longest = max(poll_seconds, SHARED_POLL_SECONDS * self.consumers)
        if self.expires_ms > 0:
            longest = min(longest, self.expires_ms / 3000)
        eager = EAGER_POLL_SECONDS if unexpected else self.poll_seconds * 2
        self.poll_seconds = min(eager, longest)
        self.poll_at = now + self.poll_seconds * self._agenda.spread

    def passed_on(self) -> None:
        """Note that others were told; this consumer claims as soon as it has room."""
        self.ready, self.owes = True, False
        self.due_at = math.inf

    def moves(self, now: float) -> None:
        """Try again later, because the queue is moving to another node."""
        self.ready = self.owes = False
        self.due_at = self.poll_at = now + MOVING_SECONDS

    def must_keep(self, now: float) -> bool:
        """Whether the queue would expire without a call, though this consumer has no room."""
        return self.expires_ms > 0 and self.poll_at <= now


class Times:
    """A heap of sources by one of their times. An outdated entry stays until it would be first."""

    def __init__(self, time_of: Callable[[Source], float]) -> None:
        self._time_of = time_of
        #: The earliest time.
        self.first_at = math.inf
        self._heap: list[tuple[float, int, Source]] = []
        self._numbers = count()
        self._most = 64

    def put(self, source: Source, at: float) -> None:
        """Note the new time of a source."""
        if at != math.inf:
            heapq.heappush(self._heap, (at, next(self._numbers), source))
            if len(self._heap) > self._most:
                self._drop_old()
        self._find_first()

    def _find_first(self) -> None:
        heap, time_of = self._heap, self._time_of
        while heap and time_of(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        self.first_at = heap[0][0] if heap else math.inf

    def _drop_old(self) -> None:
        true = [entry for entry in self._heap if self._time_of(entry[2]) == entry[0]]
        times = {id(entry[2]): entry for entry in true}
        self._heap = sorted(times.values())
        self._most = max(64, 2 * len(self._heap))

    def come(self, now: float) -> list[Source]:
        """The sources whose time has come, each once. A source comes again with another time."""
        found = {}
        while self.first_at <= now:
            source = heapq.heappop(self._heap)[2]
            found[source.queue] = source
            self._find_first()
        return [*found.values()]

    def come_early(self, now: float) -> list[Source]:
        """As `come`, if a source's time has come; also returns the sources that poll soon."""
        found = []
        while (at := self.first_at) < math.inf:
            source = self._heap[0][2]
            if at - now > POLL_EARLY * source.poll_seconds:
                break
            found.append(heapq.heappop(self._heap)[2])
            self._find_first()
        return found


class Agenda:
    """The sources of a consumer that have something to do, now or at a known time."""

    def __init__(self) -> None:
        #: Polls come after this fraction of their interval.
        self.spread = 1.0
        self.ready: dict[str, Source] = {}
        self.owing: dict[str, Source] = {}
        self.due = Times(attrgetter("_due_at"))
        self.polls = Times(attrgetter("_poll_at"))
        #: Polls of queues that would expire without them.
        self.kept = Times(attrgetter("_poll_at"))

    def forget(self, source: Source) -> None:
        """Remove a source."""
        source.due_at = source.poll_at = math.inf
        source.file_in(Agenda())
        for names in (self.ready, self.owing):
            names.pop(source.queue, None)

    def come(
        self,
        now: float,
        has_room: bool,
        poll: Callable[[list[Source], float], set[str]],
        poll_seconds: float,
    ) -> list[Source]:
        """Find out which sources are ready; returns those that expire without a call.

        `poll` returns which of the given queues have messages. Without room there is no poll.
        """
        if self.due.first_at <= now:
            for source in self.due.come(now):
                source.ready = source.owes = True
        kept = self.kept.come(now) if self.kept.first_at <= now else []
        polled = self.polls.come_early(now) if has_room and self.polls.first_at <= now else []
        if not kept and not polled:
            return []
        found = poll(polled, now) if polled else set()
        for source in polled:
            if source.queue not in found:
                source.plan_poll(False, now, poll_seconds)
        for source in [*kept, *(each for each in polled if each.queue in found)]:
            source.found = source.found or not source.ready
            source.ready = True
        return kept

    def wanted(self, cycle: Any, turns: int) -> list[list[Source]]:
        """The shards to claim from: queues in their turn, and in each its shards in their turn.

        At most `turns` turns are taken, because a cycle of the program's own may be endless.
        """
        shards: dict[str, list[Source]] = {}
        for source in sorted(self.ready.values(), key=_claimed_at):
            shards.setdefault(source.whole, []).append(source)
        return [shards[queue] for queue in cycle.consume(turns) if queue in shards]

    def wants(self, now: float) -> bool:
        """Whether there may be something to claim."""
        times = self.due.first_at, self.polls.first_at, self.kept.first_at
        return bool(self.ready) or min(times) <= now


#: Yields sources with their shares of the room. Send it None, then how many each claim has brought.
Shares = Generator[tuple[Source, int], int | None, None]


def shares(wanted: list[list[Source]], room: int, cycle: Any) -> Shares:
    """Yield each source with its share of the room. The rest goes to the next ones."""
    is_strict = isinstance(cycle, priority_cycle)
    for queues, shards in zip(range(len(wanted), 0, -1), wanted, strict=True):
        part = room if is_strict else -(-room // queues)
        for left, source in zip(range(len(shards), 0, -1), shards, strict=True):
            if (share := -(-part // left)) > 0:
                claimed = (yield source, share) or 0
                room, part = room - claimed, part - claimed


def share_out(shares: Shares, claim: Callable[[Source, int], int]) -> None:
    """Claim for each source its share of the room."""
    try:
        source, share = next(shares)
        while True:
            source, share = shares.send(claim(source, share))
    except StopIteration:
        return
