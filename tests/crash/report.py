"""The findings of a run, for the terminal."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from rich.table import Table

from tests.benchmarks.report import percentile
from tests.crash.answers import ENDS, SAID
from tests.crash.history import Execution, Key
from tests.crash.limits import SLOTS
from tests.crash.run import Result
from tests.crash.schedule import FAULTS
from tests.crash.verdict import CAUSES

#: How many of the latest executions are shown.
SHOWN = 6

TITLES = {"delayed": "`delayed+redis://`", "stock": "`redis://`"}

Rows = list[tuple[str, str]]


def rows(result: Result) -> Rows:
    verdict = result.verdict
    fates = [life.fate for life in result.crew.lives]
    unanswered, asked = len(verdict.pings.unanswered), verdict.pings.asked
    found = [
        ("faults", sum(result.faults.values())),
        ("sent", result.sent),
        ("accepted", result.sent - result.refused),
        ("executions expected, with retries and chains", verdict.expected),
        ("run, to the end if acked late", verdict.ran),
        ("**lost**", len(verdict.lost)),
        ("**stuck**: held on the server when the run ended", len(verdict.stuck)),
        ("not sent, because the task before it failed, is lost or stuck", verdict.not_sent),
        ("**early**, by the server's clock", len(verdict.early)),
        ("acked when it started, worker died before its first line", len(verdict.dropped)),
        ("run more than once", sum(verdict.repeats.values())),
        *((f"— {cause}", verdict.repeats[cause]) for cause in CAUSES),
        ("task failed", len(verdict.failed)),
        ("messages on the server at the end", sum(map(len, verdict.left.values()))),
        ("workers that ended unexpectedly", fates.count("by itself")),
        ("workers that did not end when asked", fates.count("hung")),
        ("earliest", f"{verdict.earliest_ms:.1f} ms" if verdict.early else "-"),
        _lateness("late", verdict.late_ms),
        _lateness(
            "late at a worker, outside of faults and recovery", [*verdict.calm_late_ms.values()]
        ),
        ("— allowed for the 99th percentile", f"{verdict.allowed_ms:,.0f} ms"),
        _lateness("— a control task without faults", verdict.control_ms),
        ("**pings without an answer**, outside of faults", f"{unanswered} of {asked:,}"),
        ("runs that were compared with their records of outcomes", verdict.records.runs),
        ("— **not recorded**", len(verdict.records.missing)),
        ("— **recorded, and never happened**", len(verdict.records.untrue)),
        ("— **recorded as running** by a worker that has ended", len(verdict.records.running)),
        ("**leaked keys** at the end", len(verdict.leaked)),
        ("**polled in vain** by workers at the end", len(verdict.ghosts)),
        *((f"fault: {fault.meaning}", result.faults[kind]) for kind, fault in FAULTS.items()),
    ]
    if result.stalls_ms:
        stall = f"{max(result.stalls_ms):,.0f} ms, {result.given_up} given up"
        what = f"longest wait while {result.order.reshard:,} messages moved at once"
        found.append((what, stall))
        found.append(("— present at the end", f"{result.kept:,} of {result.order.reshard:,}"))
    return _shown(found)


def limit_rows(result: Result) -> Rows:
    limits = result.verdict.limits
    most = dict.fromkeys(SLOTS, 0)
    for limit, count in limits.most.items():
        name = limit.partition(" ")[0]
        most[name] = max(most[name], count)
    slots = ((f"— most in use at once, of {SLOTS[n]} slots of {n}", most[n]) for n in most)
    return _shown(
        [
            ("tasks with limits that started", limits.runs),
            *slots,
            ("**over a limit**: more tasks were running than allowed", len(limits.over)),
            ("— counting tasks that continued without slots", len(limits.over_with_zombies)),
            (
                "— of a global limit, until workers have told the new master what they use",
                len(limits.over_after_failover),
            ),
            ("**over a rate**: more tasks started in a period than allowed", len(limits.too_fast)),
            ("**leaked**: slots in use and tasks at the gates at the end", len(limits.held)),
            _lateness("late", result.verdict.limited_late_ms),
        ]
    )


def answer_rows(result: Result) -> Rows:
    answers = result.verdict.answers
    return _shown(
        [
            ("questions", answers.asked),
            *((f"— ended with {what}", answers.ended[what]) for what in ENDS),
            ("answers", sum(answers.told.values())),
            *((f"— {said}", answers.told[said]) for said in SAID),
            ("**no end**", len(answers.lost)),
            ("**more than one end**", len(answers.twice)),
            ("**another end** than `respond` returned", len(answers.contrary)),
            ("answers that raised an error", len(answers.unheard)),
        ]
    )


def _shown(rows: Sequence[tuple[str, int | str]]) -> Rows:
    return [(what, it if isinstance(it, str) else f"{it:,}") for what, it in rows]


def _lateness(what: str, values: Sequence[float]) -> tuple[str, str]:
    if not values:
        return f"{what}: p50 / p99 / max", "-"
    figures = percentile(values, 0.5), percentile(values, 0.99), max(values)
    text = " / ".join(f"{figure:,.0f}" for figure in figures)
    return f"{what}: p50 / p99 / max", f"{text} ms ({len(values):,})"


def as_table(results: Sequence[Result]) -> Table:
    table = Table(title=title(results[0]), title_justify="left")
    table.add_column("what")
    for result in results:
        table.add_column(heading(result).replace("`", ""), justify="right")
    for cells in zip(*map(rows, results), strict=True):
        table.add_row(cells[0][0].replace("*", ""), *(cell[1] for cell in cells))
    for result in results:
        if result.order.has_policies:
            blank = [""] * (len(results) - 1)
            for what, figure in limit_rows(result) + answer_rows(result):
                table.add_row(what.replace("*", ""), figure, *blank)
    return table


def title(result: Result) -> str:
    return f"seed {result.order.seed}"


def heading(result: Result) -> str:
    return f"{TITLES[result.order.transport]}, {result.order.seconds / 60:.3g} min"


def findings(result: Result) -> str:
    """The history of each execution that went wrong, and of the workers that received it."""
    verdict, lives = result.verdict, {life.name: life for life in result.crew.lives}

    def history(key: Key) -> str:
        found = result.executions.get(key)
        if found is None:
            return f"  {key[0]} retry {key[1]}"
        met = {line["owner"] for line in found.lines}
        workers = (f"    worker {life.describe()}" for name, life in lives.items() if name in met)
        return "\n".join([found.describe(), *workers, *faults(found)])

    def faults(found: Execution) -> Iterator[str]:
        """The faults of its workers, or of all, while it was on its way."""
        others = {*lives} - {line["owner"] for line in found.lines}
        since, until = found.lines[0]["at"] - 1, found.lines[-1]["at"] + 1
        for window in sorted(result.windows, key=lambda window: window.began):
            if window.victim not in others and window.began <= until and since <= window.ended:
                name = f"{window.kind} {window.victim}".rstrip()
                yield f"    fault {window.began:.3f} to {window.ended:.3f}: {name}"

    parts = []
    for what in ("lost", "stuck", "early", "unexplained", "failed", "dropped"):
        parts += [f"{what}:\n{history(each.key)}" for each in getattr(verdict, what)]
    for excess in verdict.limits.over:
        parts.append(f"over a limit: {excess.describe()}")
        parts += map(history, excess.keys)
    parts += [
        f"over a rate: {count} began within {seconds:.3f} s from {since:.3f}"
        for since, count, seconds in verdict.limits.too_fast
    ]
    parts += [f"leaked: {what}" for what in verdict.limits.held]
    for what in ("lost", "twice", "contrary", "unheard"):
        for question in getattr(verdict.answers, what):
            parts.append(f"questions, {what}: {question.describe()}")
            parts += [history((id, 0)) for id in (question.id, *question.followers)]
    for what in ("missing", "untrue", "running"):
        parts += [f"records, {what}: {each}" for each in getattr(verdict.records, what)[:SHOWN]]
    for key in heapq.nlargest(SHOWN, verdict.calm_late_ms, key=verdict.calm_late_ms.__getitem__):
        late_ms = verdict.calm_late_ms[key]
        if late_ms > verdict.allowed_ms:
            parts.append(f"{late_ms:,.0f} ms late with no fault:\n{history(key)}")
    for key, places in verdict.left.items():
        parts.append(f"left on the server, in {', '.join(places)}:\n{history(key)}")
    for at, name in verdict.pings.unanswered:
        parts.append(f"no answer to a ping at {at:.3f}: worker {lives[name].describe()}")
    parts += [f"leaked key: {key}" for key in verdict.leaked]
    parts += [f"polled in vain by {ghost}" for ghost in verdict.ghosts]
    for life in lives.values():
        if life.last_words:
            parts.append(f"worker {life.describe()}\n{life.last_words}")
    return "\n".join(parts)
