"""The possible causes of a second run or of exceeded limits, and findings that are no fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.crash import verdict
from tests.crash.clock import Readings
from tests.crash.evidence import ALONE, OCCUPIED, STALL_SECONDS, Evidence, stalls
from tests.crash.faults import Window
from tests.crash.history import NEVER, collect
from tests.crash.in_use import Limits
from tests.crash.journal import REJECTED, SENDER
from tests.crash.limits import PACE_BURST, PACE_SECONDS, SLOTS, Uses
from tests.crash.load import Plan
from tests.crash.verdict import ACK_SECONDS, Verdict, judge

LEASE_SECONDS = 2.5
PID = 7
KILLED_AT = 100.0
AGAIN_AT = 104.0
JUST_BEFORE = KILLED_AT - ACK_SECONDS / 2
LONG_BEFORE = KILLED_AT - ACK_SECONDS * 2

Event = tuple[float, str, dict[str, Any]]


def life(name: str, pool: str = "threads", **facts: Any) -> Any:
    known = {"pid": PID, "stops": [], "fate": "", "fated_at": NEVER, "ready_at": 0.0, "unlike": ""}
    known["started_at"] = 0.0
    known["ended_at"] = facts.get("fated_at", NEVER)
    return SimpleNamespace(name=name, pool=pool, **{**known, **facts})


def killed(pool: str = "threads") -> Any:
    return life("first", pool, fate="killed", fated_at=KILLED_AT)


def lines(owner: str, *events: Event, redelivered: bool = False) -> list[dict[str, Any]]:
    run = {"redelivered": redelivered, "late": True, "eta": None, "outcome": "done"}
    base = {"id": "t", "retries": 0, "owner": owner, "pid": PID}
    return [{**base, **run, "event": event, "at": at, **more} for at, event, more in events]


def ran(owner: str, at: float, redelivered: bool = True) -> list[dict[str, Any]]:
    events = ["received", "start", "end", "ack"]
    return lines(
        owner, *[(at + n / 1000, e, {}) for n, e in enumerate(events)], redelivered=redelivered
    )


def sent(*failures: float) -> list[dict[str, Any]]:
    events: list[Event] = [(90, "publish", {}), *((at, "publish failed", {}) for at in failures)]
    return lines(SENDER, *events, (91, "taken", {}))


def judged(
    first: Any,
    *journal: list[dict[str, Any]],
    plans: Sequence[Plan] = (),
    others: Sequence[Any] = (),
    **evidence: Any,
) -> Verdict:
    lives = {"first": first, "other": life("other"), **{each.name: each for each in others}}
    known = {"windows": [], **evidence}
    found = Evidence(lives=lives, lease_seconds=LEASE_SECONDS, left={}, **known)
    return judge(collect([line for part in journal for line in part], plans), found)


def causes(first: Any, *journal: list[dict[str, Any]], **evidence: Any) -> Counter[str]:
    return judged(first, *journal, **evidence).repeats


def events(received: float, end: float | None, ack: float | None) -> list[dict[str, Any]]:
    found: list[Event] = [(received, "received", {}), (received + 0.001, "start", {})]
    found += [(at, name, {}) for at, name in ((end, "end"), (ack, "ack")) if at is not None]
    return lines("first", *found)


def cut_off(since: float, seconds: float, victim: str = "first") -> Window:
    return Window(ALONE, since, since + seconds, victim)


def away(since: float, seconds: float, kind: str = "server kill") -> Window:
    return Window(kind, since, since + seconds)


def stopped(seconds: float) -> Any:
    return life("first", stops=[[96.0, 96.0 + seconds]])


def told_to_end(unlike: str, takes_seconds: float = 0.0) -> Any:
    told = {"fate": "terminated", "fated_at": KILLED_AT, "unlike": unlike}
    return life("first", "prefork", ended_at=KILLED_AT + takes_seconds, **told)


ALIVE, CUT_AT = life("first"), AGAIN_AT - 4


@pytest.mark.parametrize(
    ("first", "end", "ack", "window", "cause"),
    [
        (killed(), None, None, None, verdict.EXECUTING),
        (killed(), JUST_BEFORE, None, None, verdict.NOT_ACKED),
        (killed(), JUST_BEFORE, JUST_BEFORE, None, verdict.NOT_ACKED),
        (killed(), LONG_BEFORE, LONG_BEFORE, None, verdict.UNEXPLAINED),
        # Acked when it started, and still at work.
        (killed(), None, JUST_BEFORE, None, verdict.NOT_ACKED),
        (killed(), None, LONG_BEFORE, None, verdict.UNEXPLAINED),
        (killed("solo"), None, LONG_BEFORE, None, verdict.EXECUTING),
        (killed("solo"), LONG_BEFORE, LONG_BEFORE, None, verdict.UNEXPLAINED),
        # After an outage.
        (killed(), LONG_BEFORE, LONG_BEFORE, away(LONG_BEFORE - 0.1, 0.2), verdict.NOT_ACKED),
        (killed(), LONG_BEFORE, LONG_BEFORE, away(LONG_BEFORE - 3, 1), verdict.UNEXPLAINED),
        (killed(), LONG_BEFORE, LONG_BEFORE, away(KILLED_AT - 9, 3), verdict.UNEXPLAINED),
        (stopped(LEASE_SECONDS + 0.5), AGAIN_AT + 1, AGAIN_AT + 1, None, verdict.ZOMBIE),
        (stopped(LEASE_SECONDS / 2), AGAIN_AT + 1, AGAIN_AT + 1, None, verdict.UNEXPLAINED),
        # Cut off alone, before or after it was acked; others or for less than a lease.
        (ALIVE, AGAIN_AT + 1, AGAIN_AT + 1, cut_off(CUT_AT, 5), verdict.CUT_OFF),
        (ALIVE, AGAIN_AT - 5, AGAIN_AT - 5, cut_off(CUT_AT, 5), verdict.UNEXPLAINED),
        (ALIVE, AGAIN_AT + 1, AGAIN_AT + 1, cut_off(CUT_AT, 5, "third"), verdict.UNEXPLAINED),
        (ALIVE, AGAIN_AT + 1, AGAIN_AT + 1, cut_off(CUT_AT, 1.25), verdict.UNEXPLAINED),
        # Version 0.1.0 forgot in a warm shutdown the tasks that a process had been given and had
        # not begun. It could not report them, as the server was out of reach when it ended.
        (told_to_end(""), LONG_BEFORE, LONG_BEFORE, away(LONG_BEFORE, 9), verdict.NOT_ACKED),
        (told_to_end(""), LONG_BEFORE, LONG_BEFORE, away(LONG_BEFORE, 0.2), verdict.UNEXPLAINED),
        # Nor did it wait for the server, once it was told to end.
        (told_to_end(""), KILLED_AT + 1, KILLED_AT + 1, away(KILLED_AT, 1.2), verdict.NOT_ACKED),
        (told_to_end(""), KILLED_AT + 1, KILLED_AT + 1, None, verdict.UNEXPLAINED),
        # The server went away between the ack and the end of the worker.
        (told_to_end("", 2), KILLED_AT + 1.7, KILLED_AT + 1.7, away(101.8, 1), verdict.NOT_ACKED),
        (told_to_end("", 2), KILLED_AT + 1.7, KILLED_AT + 1.7, away(102.1, 1), verdict.UNEXPLAINED),
        (told_to_end("previous"), AGAIN_AT, None, None, verdict.PREVIOUS),
        (told_to_end("previous"), LONG_BEFORE, LONG_BEFORE, None, verdict.UNEXPLAINED),
        (told_to_end(""), AGAIN_AT, None, None, verdict.UNEXPLAINED),
        # A worker that was cut off like all others keeps its messages, however long that took.
        (ALIVE, AGAIN_AT + 1, AGAIN_AT + 1, away(CUT_AT, 5, "outage"), verdict.UNEXPLAINED),
        (ALIVE, AGAIN_AT + 1, AGAIN_AT + 1, away(CUT_AT, 5, "clock hour"), verdict.UNEXPLAINED),
    ],
)
def test_why_a_task_runs_again(
    first: Any, end: float | None, ack: float | None, window: Window | None, cause: str
) -> None:
    journal = sent(), events(95, end, ack), ran("other", AGAIN_AT)
    assert causes(first, *journal, windows=[window] if window else []) == {cause: 1}


@pytest.mark.parametrize(
    ("unlike", "ended", "seconds", "cause"),
    [
        ("previous", NEVER, 5, verdict.BY_ITS_CLOCK),
        ("previous", CUT_AT + 4, 5, verdict.UNEXPLAINED),
        ("previous", NEVER, LEASE_SECONDS / 2, verdict.UNEXPLAINED),
        ("", NEVER, 5, verdict.UNEXPLAINED),
    ],
)
def test_version_0_1_0_goes_by_its_clock_after_an_outage(
    unlike: str, ended: float, seconds: float, cause: str
) -> None:
    journal = sent(), events(95, AGAIN_AT + 1, AGAIN_AT + 1), ran("other", AGAIN_AT)
    others = [life("previous", unlike=unlike, fated_at=ended)]
    windows = [away(CUT_AT, seconds, "outage")]
    assert causes(ALIVE, *journal, windows=windows, others=others) == {cause: 1}


@pytest.mark.parametrize(
    ("kind", "received", "acked", "cause"),
    [
        # Messages that were not acked before it: their acks may have been on their way.
        ("planned failover", KILLED_AT + 0.1, NEVER, verdict.NOT_REPLICATED),
        ("planned failover", LONG_BEFORE, JUST_BEFORE, verdict.NOT_REPLICATED),
        ("planned failover", JUST_BEFORE, NEVER, verdict.UNEXPLAINED),
        ("planned failover", LONG_BEFORE - 1, LONG_BEFORE, verdict.UNEXPLAINED),
        ("failover", JUST_BEFORE, NEVER, verdict.NOT_REPLICATED),
        ("failover", LONG_BEFORE - 1, LONG_BEFORE, verdict.UNEXPLAINED),
    ],
)
def test_another_server_is_the_master(kind: str, received: float, acked: float, cause: str) -> None:
    ack = None if acked == NEVER else acked
    journal = sent(), events(received, ack, ack), ran("other", AGAIN_AT)
    window = Window(kind, KILLED_AT, KILLED_AT + 1)
    assert causes(life("first"), *journal, windows=[window]) == {cause: 1}


def test_a_server_that_is_slow_with_no_fault_is_away() -> None:
    slow = STALL_SECONDS * 1.1
    journal = lines(SENDER, (JUST_BEFORE, "publish", {}), (JUST_BEFORE + slow, "published", {}))
    windows = [*stalls(journal)]
    assert [(each.began, each.ended) for each in windows] == [(JUST_BEFORE, JUST_BEFORE + slow)]
    journal[1]["at"] -= slow / 2
    assert not [*stalls(journal)]
    killed_later = sent(), events(95, LONG_BEFORE + 0.3, LONG_BEFORE + 0.3), ran("other", AGAIN_AT)
    assert causes(killed(), *killed_later, windows=windows) == {verdict.NOT_ACKED: 1}
    assert causes(killed(), *killed_later) == {verdict.UNEXPLAINED: 1}


@pytest.mark.parametrize(
    ("pool", "busy", "cause"),
    [
        ("gevent", "first", verdict.NOT_ACKED),
        ("gevent", "other", verdict.UNEXPLAINED),
        ("prefork", "first", verdict.UNEXPLAINED),
    ],
)
def test_no_ack_leaves_while_a_greenlet_does_not_yield(pool: str, busy: str, cause: str) -> None:
    journal = sent(), events(95, LONG_BEFORE, LONG_BEFORE), ran("other", AGAIN_AT)
    window = Window(OCCUPIED, LONG_BEFORE + 0.1, KILLED_AT, busy)
    assert causes(killed(pool), *journal, windows=[window]) == {cause: 1}


def test_what_was_acked_early_waits_for_the_answer_of_a_server_that_is_away() -> None:
    journal = sent(), lines("first", (95, "received", {}), (LONG_BEFORE, "accepted", {}))
    gone = judged(killed(), *journal, windows=[away(LONG_BEFORE, 1)])
    assert (len(gone.dropped), gone.lost) == (1, [])
    assert len(judged(killed(), *journal).lost) == 1


def test_each_failure_to_publish_explains_one_run() -> None:
    runs = [ran("other", at, redelivered=False) for at in (101, 102, 103)]
    assert causes(life("first"), sent(90.5), *runs) == {
        verdict.AMBIGUOUS: 1,
        verdict.UNEXPLAINED: 1,
    }
    assert causes(life("first"), sent(), *runs) == {verdict.UNEXPLAINED: 2}


def test_what_could_not_be_sent_runs_again() -> None:
    first = lines(
        "first",
        (95, "received", {}),
        (95.1, "start", {}),
        (95.2, "end", {"outcome": REJECTED}),
        (95.2, "reject", {}),
    )
    again = ran("other", 96)
    assert causes(life("first"), sent(), first, again) == {verdict.GIVEN_BACK: 1}
    first[2]["outcome"] = "done"
    assert causes(life("first"), sent(), first, again) == {verdict.UNEXPLAINED: 1}


@pytest.mark.parametrize(
    ("owner", "outcome", "cause"),
    [
        ("autoscale2", "SystemExit(-241)", verdict.EXECUTING),
        ("autoscale2", "done", verdict.UNEXPLAINED),
        ("first", "SystemExit(-241)", verdict.UNEXPLAINED),
    ],
)
def test_a_pool_that_shrinks_ends_a_process_that_has_just_begun(
    owner: str, outcome: str, cause: str
) -> None:
    first = lines(
        owner,
        (95, "received", {}),
        (95.1, "start", {}),
        (95.2, "end", {"outcome": outcome}),
        (95.3, "reject", {"requeue": True}),
    )
    others = [life("autoscale2", "prefork")]
    assert causes(ALIVE, sent(), first, ran("other", 96), others=others) == {cause: 1}


def test_what_follows_is_sent_again_by_an_expectation_that_runs_again() -> None:
    asking = [dict(line, id="e") for part in (ran("first", 95), ran("other", 96)) for line in part]
    follows = [dict(line, sent_by="e") for at in (95.1, 96.1) for line in ran("first", at, False)]
    twice = [*sent(), *lines("other", (96, "publish", {}))]
    found = causes(life("first"), asking, twice, follows)
    assert found == {verdict.SENT_AGAIN: 1, verdict.UNEXPLAINED: 1}  # of the expectation itself
    for line in follows:
        del line["sent_by"]
    assert causes(life("first"), asking, twice, follows) == {verdict.UNEXPLAINED: 2}


@pytest.mark.parametrize(("answered", "early"), [(True, 0), (False, 1)])
def test_an_answer_comes_before_the_timeout(answered: bool, early: int) -> None:
    eta = {"eta": "1970-01-01T00:01:40+00:00"}
    journal = lines("first", (90, "published", eta), (95, "start", {"answered": answered, **eta}))
    assert len(judged(life("first"), journal).early) == early


@pytest.mark.parametrize(("outcome", "good"), [("done", True), ("ValueError()", False)])
def test_a_task_that_fails_is_a_fault(outcome: str, good: bool) -> None:
    run = lines("first", (90, "start", {}), (96, "end", {"outcome": outcome}))
    assert judged(life("first"), sent(), run).good == good


CUSTOMER: Uses = (("customer c1", 1),)


def task(
    name: str, owner: str, start: float, end: float | None, received: float | None = None
) -> list[dict[str, Any]]:
    events: list[Event] = [(start if received is None else received, "received", {})]
    events += [(start, "start", {})]
    events += [(end, "end", {})] if end is not None else []
    return [dict(line, id=name) for line in lines(owner, *events)]


def limits_of(
    first: Any, *tasks: list[dict[str, Any]], uses: Uses = CUSTOMER, **evidence: Any
) -> Limits:
    plans = [Plan(each[0]["id"], "limited", True, uses=uses) for each in tasks]
    return judged(first, *tasks, plans=plans, **evidence).limits


def test_so_many_run_at_once() -> None:
    journal = [task(f"t{n}", "other", 90 + n, 95) for n in range(SLOTS["customer"])]
    known = limits_of(life("first"), *journal, task("next", "other", 95, 99))
    assert known.good
    assert known.most == {"customer c1": SLOTS["customer"]}
    found = limits_of(life("first"), *journal, task("next", "other", 94.999, 99))
    assert not found.good
    assert [(each.in_use, each.at) for each in found.over] == [(SLOTS["customer"] + 1, 94.999)]


def test_each_key_has_its_own_slots_and_weights_count() -> None:
    journal = [task(f"t{n}", "other", 90, 95) for n in range(SLOTS["turns"] // 2)]
    heavy: Uses = (("turns", 2),)
    assert limits_of(life("first"), *journal, uses=heavy).good
    assert not limits_of(life("first"), *journal, task("one", "other", 91, 92), uses=heavy).good
    plans = [Plan(f"t{n}", "limited", True, uses=((f"customer c{n}", 1),)) for n in range(3)]
    assert judged(life("first"), *journal, plans=plans).limits.good


@pytest.mark.parametrize(
    ("facts", "end", "begins", "over", "with_zombies"),
    [
        ({"fate": "killed", "fated_at": 96}, None, 95.9, 1, 0),
        ({"fate": "killed", "fated_at": 96}, None, 96.1, 0, 0),
        ({"fate": "by itself", "fated_at": 96}, None, 95.9, 0, 0),
        # A stopped process has its slots until its lease may have ended; then others get them.
        ({"stops": [[96, 99.5]]}, 99.6, 96.5, 1, 0),
        ({"stops": [[96, 99.5]]}, 99.6, 98, 0, 1),
        ({"stops": [[96, 99.5]]}, 99.6, 99.7, 0, 0),
        ({"stops": [[96, 97]]}, 99.6, 98, 1, 0),
        # Its processes end what they have begun.
        ({"fate": "main killed", "fated_at": 96}, 99, 96.5, 1, 0),
        ({"fate": "main killed", "fated_at": 96}, 99, 98, 0, 1),
    ],
)
def test_slots_of_what_died_or_was_stopped_are_free(
    facts: dict[str, Any], end: float | None, begins: float, over: int, with_zombies: int
) -> None:
    journal = [task(f"t{n}", "first", 95, end) for n in range(SLOTS["customer"])]
    found = limits_of(life("first", **facts), *journal, task("next", "other", begins, 99.9))
    assert (len(found.over), len(found.over_with_zombies)) == (over, with_zombies)
    assert found.good == (over == 0)


@pytest.mark.parametrize(
    ("window", "over"),
    [(cut_off(94, 5), 0), (cut_off(94, 5, "third"), 1), (away(94, 5, "outage"), 1)],
)
def test_slots_of_what_was_cut_off_alone_are_free(window: Window, over: int) -> None:
    journal = [task(f"t{n}", "first", 90, 99) for n in range(SLOTS["customer"])]
    following = task("next", "other", 97, 98)
    assert len(limits_of(life("first"), *journal, following, windows=[window]).over) == over


@pytest.mark.parametrize(
    ("kind", "ended", "over"),
    [("failover", 93, 0), ("failover", 92, 1), ("outage", 93, 1)],
)
def test_a_new_master_may_not_know_what_a_global_limit_has_lent(
    kind: str, ended: float, over: int
) -> None:
    journal = [task(f"t{n}", "other", 90, 99) for n in range(SLOTS["provider"])]
    windows = [Window(kind, 80, ended)]
    following = task("next", "other", 95, 96)
    uses: Uses = (("provider", 1),)
    found = limits_of(life("first"), *journal, following, uses=uses, windows=windows)
    assert (len(found.over), len(found.over_after_failover)) == (over, 1 - over)
    assert found.good == (over == 0)


@pytest.mark.parametrize(
    ("last_seconds", "too_fast"),
    [(PACE_SECONDS * 0.9, True), (PACE_SECONDS * 1.1, False)],
)
def test_so_many_begin_in_a_time(last_seconds: float, too_fast: bool) -> None:
    at = [*[0.0] * PACE_BURST, last_seconds]
    turns: Uses = (("turns", 1),)
    journal = [
        [*(dict(each, id=f"t{n}") for each in lines(SENDER, (90, "publish", {}))), *run]
        for n, after in enumerate(at)
        for run in [task(f"t{n}", "other", 99 + n, 99.5 + n, received=90 + after)]
    ]
    found = limits_of(life("first"), *journal, uses=turns)
    assert bool(found.too_fast) == too_fast
    assert found.good != too_fast
    stepped = Readings()
    stepped.stepped(89.9, 90.02, 60)
    assert limits_of(life("first"), *journal, uses=turns, clock=stepped).good
    for n, part in enumerate(journal):  # as their workers reported late
        part[0]["at"] = 80 + n
    assert limits_of(life("first"), *journal, uses=turns).good


def question(
    asked: bool, told: Sequence[tuple[str, str, str]], *ends: tuple[str, str, str]
) -> list[dict[str, Any]]:
    journal = lines("first", (90, "asked", {})) if asked else []
    for what, content, said in told:
        facts = {"what": what, "content": content, "said": said}
        journal += lines(SENDER, (91, "told", facts))
    for id, what, content in ends:
        facts = {"question": "t", "what": what, "content": content}
        journal += [dict(line, id=id) for line in lines("first", (92, "start", facts))]
    return journal


BOOKED = ("f", "response", "1")
REMINDED = ("f2", "timeout", "t")


@pytest.mark.parametrize(
    ("asked", "told", "ends", "wrong"),
    [
        (True, [("response", "1", "accepted")], [BOOKED], ""),
        (True, [("response", "1", "early")], [BOOKED], ""),
        (True, [("response", "1", "accepted")], [BOOKED, BOOKED], ""),
        (True, [("response", "1", "late")], [REMINDED], ""),
        (True, [], [REMINDED], ""),
        (False, [("response", "1", "early")], [], ""),
        (True, [], [], "lost"),
        (True, [("response", "1", "accepted")], [], "lost"),
        (True, [("response", "1", "accepted")], [BOOKED, ("f3", "response", "1")], "twice"),
        (True, [("response", "1", "accepted")], [BOOKED, REMINDED], "twice contrary"),
        (True, [("response", "1", "accepted")], [REMINDED], "contrary"),
        (True, [("response", "1", "late")], [BOOKED], "contrary"),
        (True, [("failure", "1", "accepted")], [BOOKED], "contrary"),
        (True, [("response", "2", "accepted"), ("response", "1", "late")], [BOOKED], "contrary"),
        (
            *(True, [("response", "1", "early"), ("failure", "2", "accepted")]),
            *([BOOKED], "contrary"),
        ),
    ],
)
def test_a_question_ends_once_and_as_was_told(
    asked: bool,
    told: list[tuple[str, str, str]],
    ends: list[tuple[str, str, str]],
    wrong: str,
) -> None:
    found = judged(life("first"), question(asked, told, *ends)).answers
    kinds = ("lost", "twice", "contrary")
    assert [kind for kind in kinds if getattr(found, kind)] == wrong.split()
    assert found.good == (not wrong)


@pytest.mark.parametrize("unlike", ["", "previous"])
def test_the_previous_version_knows_no_answer_after_a_timeout(unlike: str) -> None:
    """So its timeout follows, although the answer was accepted: docs/upgrading.md says so."""
    journal = question(True, [("response", "1", "accepted")], REMINDED)
    journal += [dict(line, id="f2") for line in lines("old", (91, "publish", {}))]
    found = judged(life("first"), journal, others=[life("old", unlike=unlike)]).answers
    assert bool(found.contrary) == (not unlike)


def test_an_answer_is_taken_or_refused() -> None:
    error = lines(SENDER, (91, "unheard", {"error": "OSError()"}))
    assert len(judged(life("first"), error).answers.unheard) == 1
    assert not judged(life("first"), error).good
