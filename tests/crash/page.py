"""The page docs/chaos.md: the findings of runs, on one kind of server or on several."""

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
Workers, pool processes and servers are killed, stopped, disconnected and replaced at random, \
clocks are stepped, and dead processes are started again. Each execution is recorded in files \
outside of the server, and counted.

Faults come in storms, with a calm period after each storm.

{tables}
## What the rows mean

**Repeats.** A task that was *executing* when its process died must run again, and one whose ack \
was on its way may run again: that is at-least-once delivery. There are three other valid \
reasons: the publisher got no answer and sent the task again, the worker alone was stopped or \
disconnected for longer than its lease ({lease:g} s here), or the task that sends it ran again. \
Any other repeat is *unexplained*.
An outage of all workers, a step of the clock and a greenlet that does not yield are not valid \
reasons, even if they last long.

**Acked when it started.** Such a task is lost if its worker dies at that moment. Use `acks_late` \
for tasks that must not be lost.

**Early and late.** A delayed task is due when the server's clock reaches its ETA, even if that \
clock was stepped. The stock transport uses the workers' clocks, which are not stepped, and is \
measured by them.

**Outside of faults and recovery.** Lateness is not counted for 1.5 s after a fault, and for 5 s \
more after an outage, a step of the clock or a stop, because consumers then poll. The same \
applies when a worker starts or ends. Of the other tasks, 99 in 100 must be at a worker within \
{late:g} ms; from then on they wait only for other tasks in its pool. On a busy machine, a \
control task on a server and a stock worker without any faults is late too. The limit is {hops} \
times its 99th percentile, if that is more.

**Pings.** Each worker is pinged every 2 s and must answer within {answer:g} s.

**Leaked keys.** When the queues are empty and the workers have ended, only these keys may remain \
on the server:

{stay}

A worker of version 0.1.0 sets no expiry on a reply to remote control. Such a reply stays if no \
client waits for it any more, and does not count.

**Polled in vain.** A file descriptor that a worker still polls although it was closed.

The stock transport runs with its default `visibility_timeout` of an hour, so the messages of a \
killed worker are *stuck* for longer than this run. Its repeats are classified by the causes that \
this transport has; all others are *unexplained*. It does not support a Cluster, and no previous \
version of it is deployed.

{circumstances}

To run it again:

```
{command}
```
{policies}"""

POLICIES = """
## Limits and answers

Some of the tasks on `delayed+redis://` are in four queues with [policies]\
(guides/policies.md#limits): fair shares of tenants, weights, limits of a queue and of each \
customer, a rate, shares of slots, and a global limit of two queues. Many of them are due at the \
same time.
Others [expect an answer](guides/correlation.md) and end. Another process answers: before the \
question, at the time of the timeout, twice, or never.

{limits}
A task holds its slots until it ends or is killed. A worker that alone was stopped or \
disconnected for longer than its lease loses its slots, and so do the processes of a worker whose \
main process was killed; their running tasks may continue.

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
