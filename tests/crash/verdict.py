"""Judges a run: what was lost, what ran more than once and why, what was early, how late it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.crash.answers import Answers, judge_answers
from tests.crash.crew import Life
from tests.crash.evidence import (
    DEATHS,
    FAILOVERS,
    OCCUPIED,
    RECOVERY_SECONDS,
    STALL,
    Calm,
    Evidence,
    allowed_ms,
    percentile_99,
)
from tests.crash.faults import Window
from tests.crash.history import NEVER, Execution, Hold, Key, Run
from tests.crash.in_use import Limits, judge_limits
from tests.crash.journal import REJECTED
from tests.crash.pings import Pings, judge_pings
from tests.crash.records import Records, judge_records
from tests.crash.schedule import AWAY

EXECUTING = "was executing when its process died"
NOT_ACKED = "its ack had not reached the server when its process died, ended or was stopped"
AMBIGUOUS = "publisher was not told (ambiguous publish retry)"
ZOMBIE = "zombie: its lease was lost while it was stopped"
CUT_OFF = "zombie: its lease was lost while it alone was cut off"
SENT_AGAIN = "sent again by a task that ran again"
GIVEN_BACK = "it gave itself back, as it could not send what follows"
NOT_REPLICATED = "its delivery or ack had not reached the replica that became the master"
PREVIOUS = "a worker of version 0.1.0 gave it back in its warm shutdown, and ran it"
BY_ITS_CLOCK = "a worker of version 0.1.0 took it over after an outage of all, as its clock said"
UNEXPLAINED = "unexplained"
CAUSES = (
    *(EXECUTING, NOT_ACKED, AMBIGUOUS, ZOMBIE, CUT_OFF, SENT_AGAIN, GIVEN_BACK, NOT_REPLICATED),
    *(PREVIOUS, BY_ITS_CLOCK, UNEXPLAINED),
)

#: The names of workers whose pools grow and shrink begin with this.
AUTOSCALE = "autoscale"
#: Pools whose tasks run beside the event loop, in its thread.
GREENLETS = frozenset({"gevent", "eventlet"})
#: An ack leaves with the next turn of the event loop, on a machine that is busy.
ACK_SECONDS = 0.5
#: How long after an outage the acks that it held up have arrived.
ACK_RECOVERY_SECONDS = 1.0


@dataclass
class Verdict:
    """Each list holds executions with a line of explanation."""

    expected: int = 0
    ran: int = 0
    lost: list[Execution] = field(default_factory=list)
    stuck: list[Execution] = field(default_factory=list)
    early: list[Execution] = field(default_factory=list)
    earliest_ms: float = 0.0
    #: Follows a task that did not reach its end: that one is counted.
    not_sent: int = 0
    #: Acked when it started, and its worker died before the first line of the task.
    dropped: list[Execution] = field(default_factory=list)
    repeats: Counter[str] = field(default_factory=Counter)
    unexplained: list[Execution] = field(default_factory=list)
    failed: list[Execution] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    #: Lateness of tasks that also wait for capacity within limits.
    limited_late_ms: list[float] = field(default_factory=list)
    #: Until a worker received it, outside of faults and of the recovery from them. Later delays are
    #: caused by other tasks in the worker's pool.
    calm_late_ms: dict[Key, float] = field(default_factory=dict)
    #: Messages that were on the server at the end, and in which keys.
    left: Mapping[Key, list[str]] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    answers: Answers = field(default_factory=Answers)
    pings: Pings = field(default_factory=Pings)
    records: Records = field(default_factory=Records)
    #: Keys that should be gone.
    leaked: Sequence[str] = ()
    #: Descriptors that workers polled in vain.
    ghosts: Sequence[str] = ()
    #: Lateness of a task that no fault strikes, while it was calm.
    control_ms: list[float] = field(default_factory=list)

    @property
    def good(self) -> bool:
        missing = self.lost or self.stuck or self.failed or self.left
        wrong = missing or self.early or self.unexplained or self.is_late
        wrong = wrong or self.leaked or self.ghosts
        parts = (self.limits, self.answers, self.pings, self.records)
        return not wrong and all(part.good for part in parts)

    @property
    def is_late(self) -> bool:
        """Whether more than one in a hundred was late with no fault."""
        return percentile_99(self.calm_late_ms.values()) > self.allowed_ms

    @property
    def allowed_ms(self) -> float:
        return allowed_ms(self.control_ms)


def judge(executions: Mapping[Key, Execution], evidence: Evidence) -> Verdict:
    calm = Calm(evidence.windows, evidence.lease_seconds)
    verdict = Verdict(left=evidence.left, leaked=evidence.leaked, ghosts=evidence.ghosts)
    judge = _Judge(executions, evidence, calm)
    for execution in executions.values():
        if execution.expected:
            verdict.expected += 1
            verdict.ran += execution.completed
            if not execution.completed:
                judge.missing(execution, verdict)
        if execution.runs:
            judge.repeated(execution, verdict)
            judge.timed(execution, verdict)
    verdict.limits = judge_limits(executions.values(), evidence)
    previous = {name for name, life in evidence.lives.items() if life.unlike == "previous"}
    verdict.answers = judge_answers(executions.values(), previous)
    verdict.records = judge_records(executions.values(), evidence)
    verdict.pings = judge_pings(evidence.pings, evidence.lives, calm)
    verdict.control_ms = [
        (start - sent) * 1000 for sent, start in evidence.control if calm.covers(sent, start)
    ]
    return verdict


class _Judge:
    def __init__(self, executions: Mapping[Key, Execution], evidence: Evidence, calm: Calm) -> None:
        self.executions = executions
        self.calm = calm
        self.evidence = evidence

    def missing(self, execution: Execution, verdict: Verdict) -> None:
        if execution.key in self.evidence.left:
            verdict.stuck.append(execution)
        elif execution.failed:
            verdict.failed.append(execution)
        elif any(self._dropped(hold) for hold in execution.holds):
            verdict.dropped.append(execution)
        elif execution.parent and self._broke_off_before(execution.parent):
            verdict.not_sent += 1
        else:
            verdict.lost.append(execution)

    def _broke_off_before(self, key: Key) -> bool:
        """Whether the task that should send it has not done so: that one counts, wherever it is."""
        parent = self.executions.get(key)
        return parent is not None and parent.expected and not parent.completed

    def _dropped(self, hold: Hold) -> bool:
        life = self.evidence.lives.get(hold.owner)
        acked = min(hold.accepted, hold.done)
        return (
            life is not None
            and life.fate in DEATHS
            and acked <= life.ended_at
            and life.fated_at < self._arrived(acked, life)  # a run waits until its ack has arrived
        )

    def repeated(self, execution: Execution, verdict: Verdict) -> None:
        for number, run in enumerate(execution.runs[1:], 1):
            cause = self._cause(execution, run, number)
            verdict.repeats[cause] += 1
            if cause == UNEXPLAINED:
                verdict.unexplained.append(execution)

    def _cause(self, execution: Execution, run: Run, number: int) -> str:
        published = self._published_again(execution, run)
        held = self._held_before(execution, run)
        first, second = (held, published) if run.redelivered else (published, held)
        return first or second or self._not_replicated(execution, run) or UNEXPLAINED

    def _not_replicated(self, execution: Execution, run: Run) -> str | None:
        earlier = [hold for hold in execution.holds if hold.run is not run]
        for window in self.evidence.windows:
            if window.kind not in FAILOVERS:
                continue
            since, until = window.began - ACK_SECONDS, window.ended + RECOVERY_SECONDS
            # A replica that takes over by plan has what the master had answered before.
            delivered_since = window.began if window.kind == "planned failover" else since
            for hold in earlier:
                if delivered_since <= hold.at <= until or since <= hold.done <= until:
                    return NOT_REPLICATED
        return None

    def _published_again(self, execution: Execution, run: Run) -> str | None:
        before = [line["event"] for line in execution.lines if line["at"] <= run.start]
        failed = before.count("publish failed")
        fresh = sum(not r.redelivered for r in execution.runs if r.start < run.start)
        if fresh >= before.count("publish") + failed:
            return None  # each message that can exist has run already
        if failed:
            return AMBIGUOUS
        parent = self.executions.get(execution.parent) if execution.parent else None
        if parent is not None and len(parent.runs) > 1:
            return SENT_AGAIN
        return None

    def _held_before(self, execution: Execution, run: Run) -> str | None:
        earlier = [h for h in execution.holds if h.at <= run.start and h.run is not run]
        # A zombie keeps running a message that others have run already.
        own = [h for h in execution.holds if h.run is run]
        for hold in [*reversed(earlier), *own]:
            if cause := self._why_not_done(hold):
                return cause
            if hold.requeued and (execution.cut_short or _was_scaled_down(hold)):
                return EXECUTING
        return None

    def _why_not_done(self, hold: Hold) -> str | None:
        """Why others got a message that a worker had received."""
        if hold.run and hold.run.outcome == REJECTED:
            return GIVEN_BACK
        life = self.evidence.lives.get(hold.owner)
        if life is None:
            return None
        sent = self._sent(hold, life)
        arrived = self._arrived(sent, life)
        for stopped, resumed in life.stops:
            if (
                resumed - stopped > self.evidence.shortest_lease
                and arrived > stopped
                and hold.at < resumed
            ):
                return NOT_ACKED if hold.run and hold.run.end < stopped else ZOMBIE
        if life.fate in DEATHS and arrived > life.fated_at and hold.at <= life.ended_at:
            finished = hold.run is not None and hold.run.end < life.fated_at
            return NOT_ACKED if finished or sent < life.fated_at else EXECUTING
        is_told = life.fate == "terminated" and hold.at <= life.ended_at
        if life.unlike == "previous" and is_told and arrived > life.fated_at:
            return PREVIOUS
        if is_told and arrived > life.ended_at:
            given_up_at = sent if sent > life.fated_at else life.ended_at  # it waits for no server
            if self._is_away(given_up_at, life.ended_at):
                return NOT_ACKED
        for began, ended in self.evidence.cut_off(life):
            if arrived > began and hold.at < ended:
                return CUT_OFF
        for window in self.evidence.windows:
            lasts_long = window.ended - window.began > self.evidence.shortest_lease
            is_held = hold.at < window.ended and arrived > window.began
            if window.kind == "outage" and lasts_long and is_held and self._has_previous(window):
                return BY_ITS_CLOCK
        return None

    def _has_previous(self, window: Window) -> bool:
        """Whether a worker of version 0.1.0 was there when it ended, or a moment later."""
        since, until = window.ended, window.ended + RECOVERY_SECONDS
        lives = (life for life in self.evidence.lives.values() if life.unlike == "previous")
        return any(each.started_at <= until and each.ended_at >= since for each in lives)

    def _is_away(self, since: float, until: float) -> bool:
        """Whether the server was out of reach at some time between two moments."""
        away = (window for window in self.evidence.windows if window.kind in AWAY)
        last = max(since, until)
        return any(window.began <= last and since <= window.ended for window in away)

    def _sent(self, hold: Hold, life: Life) -> float:
        """When its ack was sent: by a solo worker not before its only thread was free."""
        if life.pool != "solo" or hold.run is None:
            return hold.done
        return max(hold.done, hold.run.end)

    def _arrived(self, sent: float, life: Life) -> float:
        """Until when an ack may not have reached the server.

        At least while the server was away, or a greenlet of the worker blocked the others.
        """
        arrived = sent + ACK_SECONDS
        for window in sorted(self.evidence.windows, key=lambda window: window.began):
            is_busy = window.kind == OCCUPIED and window.victim == life.name
            held_up = window.kind in (*AWAY, STALL) or (is_busy and life.pool in GREENLETS)
            if held_up and window.began <= arrived and sent <= window.ended:
                arrived = max(arrived, window.ended + ACK_RECOVERY_SECONDS)
        return arrived

    def timed(self, execution: Execution, verdict: Verdict) -> None:
        start, wanted = execution.runs[0].start, execution.wanted_at(self.evidence.clock)
        if (execution.due is None and wanted == NEVER) or execution.was_answered:
            return
        if start < wanted and execution.due:
            verdict.early.append(execution)
            earliest = start if wanted == NEVER else wanted
            verdict.earliest_ms = max(verdict.earliest_ms, (earliest - start) * 1000)
        late_ms = max(start - wanted, 0) * 1000
        if execution.uses:
            verdict.limited_late_ms.append(late_ms)
            return
        verdict.late_ms.append(late_ms)
        received = min((hold.at for hold in execution.holds), default=start)
        if self.calm.covers(wanted, received):
            verdict.calm_late_ms[execution.key] = max(received - wanted, 0) * 1000


def _was_scaled_down(hold: Hold) -> bool:
    """Whether Celery has ended its process, which it took for idle, to make its pool smaller."""
    is_ended = hold.run is not None and hold.run.outcome.startswith("SystemExit")
    return is_ended and hold.owner.startswith(AUTOSCALE)
