"""How late callbacks to one host are while another host does not answer."""

from __future__ import annotations

import json
import socket
import time
from contextlib import closing
from typing import Any

from celery_ext.control.delayed import Delayed
from celery_ext.http.callbacks.jobs import BY_STATUS, JOB_TASK
from celery_ext.http.serving.standalone import BROKER, OPTIONS, make_app
from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import Rig
from tests.kit.receiver import receiving
from tests.kit.wait import wait_until

#: Jobs to the host that hangs, and how long each of its callbacks may take.
HUNG, TIMEOUT_SECONDS = 200, 10

#: Callbacks per second to the other host.
RATE = 20

SLOTS = 20


def _job(id: str, callback: str, due: float) -> Any:
    """A row of bulk scheduling."""
    kwargs = {"topic": "order", "callback": callback, "content": "", "retry": 0}
    options = {"task_id": id, "countdown": max(due - time.time(), 0.001), "headers": {BY_STATUS: 1}}
    return JOB_TASK, [], {**kwargs, "created": int(time.time())}, None, options


def _measure(rig: Rig, seconds: int, hung: int) -> Figures:
    options = {"callbacks": True, "callback_allow": ["localhost:*", "127.0.0.1:*"]}
    options |= {"callback_per_host": SLOTS, "callback_seconds": TIMEOUT_SECONDS}
    environment = {BROKER: rig.url(), OPTIONS: json.dumps(options)}
    with (
        receiving() as receiver,
        socket.create_server(
            ("127.0.0.1", 0), backlog=512
        ) as silent,  # it accepts connections and never answers
        make_app(rig.url(), options) as app,
        closing(Delayed(app)) as delayed,
    ):
        late, due = list[float](), {"first": time.time()}

        def arrived(handler: Any) -> None:
            late.append(1000 * (time.time() - due[handler.headers["webhook-id"]]))
            handler.send_response(204)
            handler.end_headers()

        receiver.answers["/healthy"] = arrived
        rig.start(
            *("celery", "-A", "celery_ext.http.serving.standalone", "worker", "-P", "threads"),
            *("-c", str(SLOTS), "--without-mingle", "--without-gossip"),
            environment=environment,
            log=rig.directory / "callbacks.log",
        )
        healthy = f"http://localhost:{receiver.port}/healthy"
        delayed.schedule_many([_job("first", healthy, due["first"])], progress=None)
        wait_until(lambda: late, "the worker has begun", 60)
        late.clear()
        port, begins = silent.getsockname()[1], time.time() + 3
        rows = [_job(f"hung-{n}", f"http://127.0.0.1:{port}/", begins) for n in range(hung)]
        count = RATE * seconds
        due |= {f"healthy-{n}": begins + 2 + n / RATE for n in range(count)}
        rows += [_job(id, healthy, at) for id, at in due.items() if id != "first"]
        delayed.schedule_many(rows, progress=None)
        wait_until(lambda: len(late) >= count, "all have come", seconds + 240)
        late.sort()
    return {"p50": late[count // 2], "p99": late[int(count * 0.99)], "worst": late[-1]}


@benchmark(
    "callbacks",
    Line(
        f"{RATE} callbacks a second to a healthy host, {HUNG} jobs to one that hangs, "
        f"{SLOTS} threads: lateness p50, p99, most",
        "{p50:.0f}, {p99:.0f}, {worst:.0f} ms",
        "p99 ≤ 1,000 ms",
        reached=lambda f: f["p99"] <= 1_000,
    ),
    Line("the same without the host that hangs", "{p50_alone:.0f}, {p99_alone:.0f} ms"),
    rounds=1,
)
def callbacks(rig: Rig) -> Figures:
    seconds = rig.scaled(30, 5)
    alone = _measure(rig, seconds, 0)
    rig.redis.flushall()
    found = _measure(rig, seconds, HUNG)
    return {**found, "p50_alone": alone["p50"], "p99_alone": alone["p99"]}
