"""The load of a simulation, cut into slices, and these into windows that are simulated apart.

How long the next message of a slice will wait for a slot follows from how much work came before it
(Lindley's recursion, slice by slice). So each window begins with workers that are busy until then,
some time before the messages that it counts. It does not depend on the other windows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kombu_delayed import sizing

from .model import DAY_SECONDS, Arrivals, Fleet
from .queue import Queue, Tally, crashes

#: Messages that are in memory at the same time.
MOST_IN_SLICE = 50_000

MOST_SLICES = 200_000

#: The least messages in a window: in all, for each slot, and as a multiple of the messages that are
#: simulated before it.
LEAST_IN_WINDOW = 20_000
SLOTS_IN_WINDOW = 4
WARM_UPS_IN_WINDOW = 2

MOST_WINDOWS = 5_000

#: After this many run times the state of a queue no longer depends on its initial state.
WARM_UP_RUNS = 20

#: Parts of the sample that are compared with each other, for its error.
GROUPS = 10

#: Counts with a higher mean are as good as normal.
_NORMAL_FROM = 50


class Slice(NamedTuple):
    """Messages that are due in `span_seconds` from `at` on, evenly or, without any, at once."""

    number: int
    at: float
    span_seconds: float
    messages: int


@dataclass(frozen=True)
class Window:
    """Neighbouring slices, of which the first `warm_up` do not count.

    The first message finds a free slot after `wait_seconds`. Windows of one `group` are a sample of
    all. Windows of group 0 are always simulated.
    """

    number: int
    wait_seconds: float
    warm_up: int
    slices: tuple[Slice, ...]
    group: int = 0

    @property
    def counted(self) -> tuple[Slice, ...]:
        return self.slices[self.warm_up :]

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self.counted)


def dice_of(fleet: Fleet, *what: object) -> random.Random:
    """A random generator that depends only on the seed and on its purpose."""
    return random.Random("/".join(map(str, (fleet.seed, *what))))


# Slices.


def slices_of(counts: Iterable[tuple[float, float, int]]) -> list[Slice]:
    """Slices from (first due, last due, messages) in order of time; large ones are cut up."""
    found: list[Slice] = []
    for first, last, messages in counts:
        parts = -(-messages // MOST_IN_SLICE)
        span = (last - first) / max(parts, 1)
        for part in range(parts):
            count = messages * (part + 1) // parts - messages * part // parts
            found.append(Slice(len(found), first + part * span, span, count))
    return found


def arriving(arrivals: Arrivals, fleet: Fleet) -> Iterator[tuple[float, float, int]]:
    """Random numbers of messages due in each second, or in each part of a longer time."""
    dice = dice_of(fleet, "arrivals")
    length = max(1.0, arrivals.seconds / MOST_SLICES)
    spread = arrivals.messages * (1 - arrivals.on_the_hour)
    at, hour = 0.0, -1
    while at < arrivals.seconds:
        end = min(at + length, arrivals.seconds)
        if arrivals.on_the_hour and int(at // 3600) > hour:
            hour = int(at // 3600)
            until = min((hour + 1) * 3600.0, arrivals.seconds)
            share = arrivals.messages * arrivals.on_the_hour
            yield (
                hour * 3600.0,
                hour * 3600.0,
                round(share * _share(arrivals, hour * 3600.0, until)),
            )
        count = _count(dice, spread * _share(arrivals, at, end), arrivals.dispersion)
        if count:
            yield at, end, count
        at = end


def _share(arrivals: Arrivals, begin: float, end: float) -> float:
    """The share of all that is due between two times: a rate with its peak at noon."""

    def until(seconds: float) -> float:
        turn = 2 * math.pi / DAY_SECONDS
        return seconds - (arrivals.peak - 1) * math.sin(turn * seconds) / turn

    return (until(end) - until(begin)) / until(arrivals.seconds)


def _count(dice: random.Random, mean: float, dispersion: float) -> int:
    """A random number: Poisson, or negative binomial if it is more dispersed."""
    if dispersion > 1 and mean > 0:
        mean = dice.gammavariate(mean / (dispersion - 1), dispersion - 1)
    if mean > _NORMAL_FROM:
        return max(round(dice.gauss(mean, math.sqrt(mean))), 0)
    left, count = math.exp(-mean), -1
    product = 1.0
    while product > left or count < 0:
        product *= dice.random()
        count += 1
    return count


def messages_of(part: Slice, fleet: Fleet) -> Iterator[tuple[float, float]]:
    """When each message is due, in order, and how long it occupies a slot. Seconds.

    Due times are whole milliseconds, rounded up, as the transport has them.
    """
    dice = dice_of(fleet, "slice", part.number)
    at, span = part.at, part.span_seconds
    chance = dice.random
    dues = sorted([math.ceil((at + span * chance()) * 1000) / 1000 for _ in range(part.messages)])
    runs = fleet.runs.sampler(dice)
    for due in dues:
        yield due, runs() + sizing.TASK_SECONDS


# Waits.


def waits(slices: Sequence[Slice], fleet: Fleet) -> list[float]:
    """How long a message that is due when a slice begins waits; at the end, after the last one."""
    dice = dice_of(fleet, "work")
    each, variation = fleet.message_seconds, fleet.runs.variation
    found, wait = [], 0.0
    ends = [*(part.at for part in slices[1:]), math.inf]
    for part, end in zip(slices, ends, strict=True):
        found.append(wait)
        chance = dice.gauss(0, math.sqrt(variation * part.messages)) if variation else 0.0
        work = max(part.messages + chance, 0.0) * each
        last = part.at + part.span_seconds
        wait = max(wait + work - part.span_seconds, 0.0)
        if end != math.inf:
            wait = max(wait - (end - last), 0.0)
    return [*found, wait]


# Windows.


def warm_up_seconds(fleet: Fleet) -> float:
    """How long a queue is simulated before anything counts."""
    crash = fleet.lease_seconds + fleet.restart_seconds if fleet.crashes_per_day else 0.0
    return WARM_UP_RUNS * fleet.slot_seconds + crash


def windows_of(slices: Sequence[Slice], waits: Sequence[float], fleet: Fleet) -> list[Window]:
    """All slices in windows of about the same number of messages."""
    bounds = [0]
    limit, messages = _window_messages(slices, fleet), 0
    for number, part in enumerate(slices):
        if messages >= limit:
            bounds.append(number)
            messages = 0
        messages += part.messages
    begins = _warm_ups(bounds, slices, waits, warm_up_seconds(fleet))
    ends = [*bounds[1:], len(slices)]
    return [
        Window(number, waits[begin], bound - begin, tuple(slices[begin:end]))
        for number, (begin, bound, end) in enumerate(zip(begins, bounds, ends, strict=True))
    ]


def _window_messages(slices: Sequence[Slice], fleet: Fleet) -> float:
    total = sum(part.messages for part in slices)
    seconds = max(slices[-1].at + slices[-1].span_seconds - slices[0].at, 1.0)
    # The slots limit how many can start, even if more are due at one instant.
    rate = min(total / seconds, 1 / fleet.message_seconds)
    warm_up = warm_up_seconds(fleet) * rate
    least = max(LEAST_IN_WINDOW, SLOTS_IN_WINDOW * fleet.capacity, total / MOST_WINDOWS)
    return max(least, WARM_UPS_IN_WINDOW * warm_up)


def _warm_ups(
    bounds: Sequence[int], slices: Sequence[Slice], waits: Sequence[float], seconds: float
) -> Iterator[int]:
    """For each bound, the slice whose first message starts one warm-up before it."""
    begin = 0
    for bound in bounds:
        starts = slices[bound].at + waits[bound] - seconds
        while begin < bound and slices[begin + 1].at + waits[begin + 1] <= starts:
            begin += 1
        yield begin


def sample(windows: Sequence[Window], most_messages: int, fleet: Fleet) -> list[Window]:
    """Windows of about `most_messages` messages, or all: some with short, some with long waits.

    Each group has at least one window, even if that exceeds the number. The window with the
    longest wait is always included, in its own group.
    """
    every = math.ceil(sum(window.messages for window in windows) / most_messages)
    every = min(every, (len(windows) - 1) // GROUPS)
    if every <= 1:
        return list(windows)
    ordered = sorted(windows, key=lambda window: (window.wait_seconds, window.number))
    first = dice_of(fleet, "sample").randrange(every)
    chosen = ordered[:-1][first::every]
    grouped = [replace(each, group=1 + n % GROUPS) for n, each in enumerate(chosen)]
    return sorted([*grouped, ordered[-1]], key=lambda window: window.number)


def run(window: Window, fleet: Fleet) -> Tally:
    begin = window.slices[0].at
    dice = dice_of(fleet, "window", window.slices[0].number)
    free_at = _busy_until(begin, window.wait_seconds, fleet, dice) if window.wait_seconds else ()
    simulated = Queue(fleet, begin, free_at, crashes(fleet, begin + window.wait_seconds, dice))
    for number, part in enumerate(window.slices):
        simulated.feed(messages_of(part, fleet), counted=number >= window.warm_up)
    simulated.drain()
    return simulated.tally


def _busy_until(
    begin: float, wait_seconds: float, fleet: Fleet, dice: random.Random
) -> list[float]:
    """When busy slots become free: each running task has the rest of its run time to go."""
    runs = fleet.runs
    rest = runs.mean * (1 + runs.variation) / 2
    draw = runs.sampler(dice)
    lengths = [draw() for _ in range(fleet.capacity)]
    # At a random moment, long runs are met more often than short ones.
    met = dice.choices(lengths, lengths, k=fleet.capacity)
    first = begin + max(wait_seconds - rest, 0.0)
    return [first + dice.random() * length for length in met]
