"""Whether the limits of the load were kept at every instant."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from tests.crash.clock import Readings
from tests.crash.crew import Life
from tests.crash.evidence import DEATHS, FAILOVERS, Evidence
from tests.crash.history import NEVER, Execution, Hold, Key, Run
from tests.crash.limits import PACE_BURST, PACE_SECONDS, PROVIDER, slots

#: Times of the server are whole milliseconds.
ROUNDING_SECONDS = 0.002


class Span(NamedTuple):
    """When a run took its slots, until when it had them, and until when it ran without them."""

    since: float
    until: float
    gone_on_until: float
    cost: int
    key: Key


@dataclass(frozen=True)
class Excess:
    """At one instant more was in use than the limit. `keys` are the executions that ran."""

    limit: str
    at: float
    in_use: int
    keys: tuple[Key, ...]

    def describe(self) -> str:
        ran = "".join(f"\n  {id} retry {retries}" for id, retries in self.keys)
        return f"{self.at:.3f}: {self.in_use} of {slots(self.limit)} slots of {self.limit}:{ran}"


@dataclass
class Limits:
    """The findings about limits. `most` is how much of each was in use at once."""

    runs: int = 0
    over: list[Excess] = field(default_factory=list)
    #: More ran than the limit, because zombies had lost their slots to others.
    over_with_zombies: list[Excess] = field(default_factory=list)
    #: The same, because a replica that became the master lacked writes.
    over_after_failover: list[Excess] = field(default_factory=list)
    #: (when, how many, in how many seconds): more began than the rate allows.
    too_fast: list[tuple[float, int, float]] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=dict)
    #: Slots and messages at gates at the end -> how many.
    held: dict[str, int] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not (self.over or self.too_fast or self.held)


def judge_limits(executions: Iterable[Execution], evidence: Evidence) -> Limits:
    limited = [execution for execution in executions if execution.uses]
    found = Limits(sum(len(each.runs) for each in limited), held=dict(evidence.held))
    for limit, spans in _spans(limited, evidence).items():
        for excess, with_zombies in _sweep(limit, spans):
            known = found.most.get(limit, 0)
            found.most[limit] = max(known, excess.in_use if not with_zombies else 0)
            if excess.in_use <= slots(limit):
                continue
            if limit == PROVIDER and _after_failover(excess.at, evidence):
                found.over_after_failover.append(excess)
            else:
                (found.over_with_zombies if with_zombies else found.over).append(excess)
    paced = [each for each in limited if "turns" in dict(each.uses)]
    found.too_fast += _too_fast(paced, evidence.clock)
    return found


def _after_failover(at: float, evidence: Evidence) -> bool:
    """Whether workers may not have reported their slots again yet, as each third of a lease."""
    return any(
        window.kind in FAILOVERS and window.began <= at <= window.ended + evidence.lease_seconds
        for window in evidence.windows
    )


def _spans(executions: Iterable[Execution], evidence: Evidence) -> Mapping[str, list[Span]]:
    spans: dict[str, list[Span]] = {}
    for execution in executions:
        for run in execution.runs:
            until, gone_on_until = _held_until(execution, run, evidence)
            for limit, cost in execution.uses:
                span = Span(run.start, until, gone_on_until, cost, execution.key)
                spans.setdefault(limit, []).append(span)
    return spans


def _held_until(execution: Execution, run: Run, evidence: Evidence) -> tuple[float, float]:
    """Until when a run surely had its slots, and until when it may have run."""
    life = evidence.lives.get(run.owner)
    if life is None:
        return run.end, run.end
    ended = run.end if run.end < NEVER else _died(life, run)
    hold = next((hold for hold in execution.holds if hold.run is run), None)
    lost = min(_lost(life, hold, run, evidence), default=NEVER)
    return max(min(ended, lost), run.start), max(ended, run.start)


def _died(life: Life, run: Run) -> float:
    """When its process died. If nobody saw that: when the run began, the earliest moment."""
    if life.fate not in DEATHS:
        return NEVER
    return run.start if life.fate == "by itself" else life.fated_at


def _lost(life: Life, hold: Hold | None, run: Run, evidence: Evidence) -> Iterator[float]:
    """The earliest times at which the lease may have ended under it."""
    since = hold.at if hold else run.start
    lasts = evidence.shortest_lease
    for stopped, resumed in life.stops:
        if resumed - stopped > lasts and resumed > since:
            yield stopped + lasts
    if life.fate == "main killed":  # its processes continue for a while
        yield life.fated_at + lasts
    for began, ended in evidence.cut_off(life):
        if ended > since:
            yield began + lasts


def _sweep(limit: str, spans: list[Span]) -> Iterator[tuple[Excess, bool]]:
    """Each rise of the amount in use: without zombies, or with them where they are the cause."""
    running: list[Span] = []
    for span in sorted(spans):
        now = span.since
        running = [each for each in running if each.gone_on_until > now] + [span]
        zombies = [each for each in running if each.until <= now < each.gone_on_until]
        sure = [each for each in running if each not in zombies]
        excess = _excess(limit, now, sure)
        if span not in zombies:
            yield excess, False
        if zombies and excess.in_use <= slots(limit):
            yield _excess(limit, now, running), True


def _excess(limit: str, at: float, spans: Iterable[Span]) -> Excess:
    found = [*spans]
    return Excess(limit, at, sum(each.cost for each in found), tuple(each.key for each in found))


def _too_fast(
    executions: Iterable[Execution], clock: Readings
) -> Iterator[tuple[float, int, float]]:
    """Where more were due and were received within some time than may begin in it.

    Each was claimed in between, even if its worker reported that late. After each step of the
    server's clock as many may begin at once as after a pause.
    """
    holds = ((each.wanted_at(clock), hold.at) for each in executions for hold in each.holds)
    claims = sorted((claim for claim in holds if claim[0] < NEVER), reverse=True)
    received: list[float] = []
    for due, group in groupby(claims, key=lambda claim: claim[0]):
        for _, at in group:
            insort(received, at)
        for count, at in enumerate(received, 1):
            seconds = at - due + ROUNDING_SECONDS
            bursts = 1 + clock.steps(due, at)
            if count > bursts * PACE_BURST + seconds / PACE_SECONDS:
                yield due, count, seconds
                break
