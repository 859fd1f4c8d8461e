"""The page docs/chaos.md: what runs found, on one kind of server or on several."""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks.report import circumstances
from tests.crash.broker import LEASE_SECONDS
from tests.crash.evidence import HOPS, LATE_MS
from tests.crash.pings import ANSWER_SECONDS
from tests.crash.remains import STAY
from tests.crash.report import answer_rows, heading, limit_rows, rows, title
from tests.crash.run import Result

HEADINGS = {
    "single": "A single server",
    "sentinel": "A master with two replicas and Sentinels",
    "cluster": "A Cluster of three masters with a replica each",
}

PAGE = """\
# Under faults

Celery workers with the pools prefork, prefork with autoscale, threads, solo, gevent and eventlet \
run a steady stream of tasks: immediate, with a countdown, retried, chained, half of them acked \
late.
Workers, pool processes and servers are killed, stopped, cut off and replaced at random, clocks \
are stepped, and what died is started again. Each execution is written to files outside of the \
server, and counted.

Faults come in storms, and after each storm there is a calm.

{tables}
## What the rows mean

**Repeats.** A task that was *executing* when its process died has to run again, and one whose ack \
was on its way may: that is at-least-once delivery. A task may also run again because its \
publisher was not told that the server had it, because its worker was stopped or cut off alone for \
longer than its lease ({lease:g} s here), or because the task that sends it ran again. Any other \
repeat is *unexplained*.
An outage of all workers, a step of the clock and a greenlet that does not yield are no such \
reasons, however long they last.

**Acked when it started.** Such a task is gone when its worker dies just then; `acks_late` is for \
tasks that must not be.

**Early and late.** A delayed task is due when the server's clock comes to its ETA. Where the \
clock was stepped, it is judged by the stepped clock. The stock transport goes by the workers' \
clocks, which nobody steps, and is judged by these.

**Outside of faults and recovery.** A fault excuses what is late for 1.5 s after it, and after an \
outage, a step of the clock or a stop for the 5 s more after which a consumer looks by itself. A \
worker that starts or ends excuses as much. Of the other tasks 99 in 100 have to be at a worker \
within {late:g} ms; from then on they wait only for other tasks in its pool. On a machine that is \
busy with something else a control task, on a server and a stock worker that no fault strikes, is \
late too: {hops} times its own 99th percentile is allowed, if that is more.

**Pings.** Every 2 s each worker is pinged and has {answer:g} s to answer.

**Leaked keys.** When the queues are empty and the workers have ended, only these keys may be left \
on the server:

{stay}

A worker of version 0.1.0 sets no expiry on a reply to remote control. Such a reply stays if \
nobody waits for it any more, and does not count.

**Polled in vain.** A descriptor that a worker still polls after it was closed.

The stock transport runs with its default `visibility_timeout` of an hour, so what a killed worker \
held is *stuck* for longer than this run. Its repeats are sorted by the causes that this transport \
has; any other one is *unexplained* there. It has no transport for a Cluster, and no previous \
version is deployed.

{circumstances}

To run it again:

```
{command}
```
{policies}"""

POLICIES = """
## Limits and answers

Some of the tasks on `delayed+redis://` are in two queues with [policies]\
(guides/policies.md#limits): fair shares of tenants, weights, limits of a queue and of each \
customer, a rate, and shares of slots. They are due many at once.
Others [ask](guides/correlation.md) and end, and are answered from another process: before they \
have asked, at the time of the timeout, twice, or never.

{limits}
A task has its slots until it ends or is killed. What was stopped or cut off alone for longer than \
its lease has lost them to others, and so have the processes of a worker whose main process was \
killed; they may go on with what they have begun.

{answers}"""


def as_page(runs: Sequence[Sequence[Result]], command: str) -> str:
    """Each of `runs` has the results of one kind of server, ours first."""
    first, policies = runs[0][0], ""
    if first.order.has_policies:
        limits = _table(["limits", ""], limit_rows(first))
        answers = _table(["questions and answers", ""], answer_rows(first))
        policies = POLICIES.format(limits=limits, answers=answers)
    return PAGE.format(
        tables="\n".join(_section(results, alone=len(runs) == 1) for results in runs),
        lease=LEASE_SECONDS,
        late=LATE_MS,
        hops=HOPS,
        answer=ANSWER_SECONDS,
        stay="\n".join(f"- {meaning}" for meaning in STAY.values()),
        circumstances=circumstances(first.server),
        command=command,
        policies=policies,
    )


def _section(results: Sequence[Result], alone: bool) -> str:
    cells = zip(*map(rows, results), strict=True)
    found = [(each[0][0], *(cell[1] for cell in each)) for each in cells]
    table = _table([title(results[0]), *map(heading, results)], found)
    return table if alone else f"## {HEADINGS[results[0].order.server]}\n\n{table}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(titles)} |".replace("  ", " "), "|---|" + "---:|" * (len(titles) - 1)]
    return "".join(f"{line}\n" for line in (*lines, *(f"| {' | '.join(row)} |" for row in rows)))
