"""A sample backlog of a shop for the eye: delayed, late, in flight, dead."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import redis
from celery import Celery
from celery.schedules import crontab

from celery_ext import Delayed
from celery_ext.policies import Fair, Limit, Shares
from celery_ext.tasks.failures import Failure, write
from kombu_delayed.message.envelope import open_envelope
from kombu_delayed.store.outcomes.records import Kept, Note, Outcomes
from kombu_delayed.store.outcomes.tallies import Tallies
from kombu_delayed.store.store import Store
from tests.kit.gates import LEASE_MS, claim
from tests.kit.pages import Visitor
from tests.kit.told import told

#: Opens a shop; returns its app, a client of Redis and a visitor of its pages.
OpenShop = Callable[[], tuple[Celery, redis.Redis, Visitor]]

TASKS = {
    "mail": ("mail.send_reminder", "mail.send_invoice", "mail.ask_for_review"),
    "billing": ("billing.charge", "billing.dunning_step", "billing.renew"),
    "default": ("cart.expire", "stock.release", "report.weekly"),
}
TENANTS = ("acme", "globex", "initech", "umbrella", "hooli", "wonka")
WORKERS = ("mail-1@web-3:214:a41f", "mail-2@web-4:377:0c9e", "pay-1@pay-1:51:77b2")
REASONS = (
    ("mail.send_reminder", "it was delivered 20 times in vain", 2),
    ("billing.charge", "ConnectionError: payments.internal:443 refused the connection", 14),
    ("billing.charge", "PaymentError: card of customer 4711 was declined", 9),
    ("mail.send_invoice", "KeyError: 'address'", 5),
)
FAILURES = (
    ("billing.charge", "ConnectionError", "payments.internal:443 refused the connection", 23),
    ("billing.charge", "PaymentError", "card of customer 4711 was declined", 9),
    ("mail.send_invoice", "KeyError", "'address'", 6),
    ("mail.send_reminder", "SoftTimeLimitExceeded", "", 2),
)
RECORDED = {
    "traceback": "Traceback (most recent call last):\n"
    '  File "shop/billing.py", line 88, in charge\n'
    "    answer = post(card)\n             ^^^^^^^^^^\n",
    "kwargs": "{}",
}

#: Queues whose tasks take turns and have limits.
POLICIES = {
    "exports": [
        Fair(by="tenant", weights={"acme": 3}),
        Limit(concurrency=4, by="tenant"),
        Limit(rate="100/m", burst=10, critical="urgent", name="partner api"),
    ],
    "imports": [Shares(10, {"acme": 0.4, "globex": 0.3}, by="tenant", borrow=False)],
}
GATED = {"exports": "exports.write", "imports": "imports.read"}


def make_shop(url: str) -> Celery:
    app = Celery("shop", broker=f"delayed+{url}", set_as_current=False)
    app.conf.task_default_queue = "default"
    app.conf.task_routes = {}
    for queue, names in TASKS.items():
        for name in names:
            app.task(_nothing, name=name, shared=False)
            app.conf.task_routes[name] = {"queue": queue}
    for name in GATED.values():
        app.task(_nothing, name=name, shared=False)
    app.conf.broker_transport_options = {"delayed_policies": POLICIES}
    app.conf.beat_schedule = {
        "weekly report": {"task": "report.weekly", "schedule": crontab("0", "7", "mon")},
        "dunning": {
            "task": "billing.dunning_step",
            "schedule": crontab("15", "4"),
            "options": {"queue": "billing"},
        },
        "release reserved stock": {"task": "stock.release", "schedule": 60.0},
    }
    return app


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def fill_shop(app: Celery, client: redis.Redis, count: int = 4_000, seed: int = 7) -> str:
    """Fill the shop; returns the id of a task with a history."""
    chance, delayed = random.Random(seed), Delayed(app)
    store = delayed.store
    for queue in TASKS:
        _history(client, store, queue, chance)
    delayed.schedule_many([_row(chance) for _ in range(count)], progress=False)
    _dead(app, store, chance)
    _in_flight(app, store)
    _outcomes(store, random.Random(seed))
    _trends(store, random.Random(seed))
    delayed.close()
    return _known(app)


def fill_gates(app: Celery) -> None:
    """Let tasks run and wait in queues with limits, and pause a part of one."""
    delayed, chance = Delayed(app), random.Random(5)
    for queue, task in GATED.items():
        for tenant, count in zip(TENANTS, (43, 17, 9, 6, 3, 2), strict=True):
            for _ in range(count):
                given = {"queue": queue, "headers": {"tenant": tenant}}
                app.send_task(task, [chance.randrange(10_000, 99_999)], **given)
        # All at one instant: between two, a rate would let more tasks run.
        delayed.store.now = str(int(time.time() * 1000))
        for at in range(1, 30, 10):
            claim(delayed, 10, queue, at, WORKERS[0])
        delayed.store.now = ""
    pauses = {"by": "maria", "why": "their import sends wrong addresses", "for_": "4h"}
    with patch("celery_ext.control.policies.declared.caller", lambda: "deploy@ci-2"):
        for queue in GATED:
            delayed.policies.apply(queue)
        delayed.pause("exports", tenant="umbrella", **pauses)
    delayed.close()


def _row(chance: random.Random) -> tuple[Any, ...]:
    queue = chance.choice(("mail", "mail", "mail", "billing", "billing", "default"))
    name = chance.choice(TASKS[queue])
    hour = time.time() % 86_400 / 3_600
    # Most of a day's load falls due around noon (UTC) and in the evening.
    peak = chance.choice((chance.gauss(11, 2.5), chance.gauss(18, 1.5), chance.uniform(0, 24)))
    days = chance.choice((0, 0, 0, 1, 2, 5, 12))
    countdown = ((peak - hour) % 24 + 24 * days) * 3_600 + 5
    options: dict[str, Any] = {"queue": queue, "priority": chance.choice((0, 3, 6))}
    options |= {"countdown": countdown, "headers": {"tenant": chance.choice(TENANTS)}}
    return name, [chance.randrange(10_000, 99_999)], {}, None, options


def _history(client: redis.Redis, store: Store, queue: str, chance: random.Random) -> None:
    now_ms, key = int(time.time() * 1000), store.keys(queue).events
    at_ms = now_ms - 600_000
    while at_ms < now_ms - 2_000:
        ago = (now_ms - at_ms) / 60_000
        at_ms += int(chance.expovariate(1 / (900 + 500 * math.sin(ago))) + 100)
        name, tenant, id = chance.choice(TASKS[queue]), chance.choice(TENANTS), f"e{at_ms}"
        late_ms = int(chance.lognormvariate(1.5, 0.9))
        known = {"task": name, "tenant": tenant, "due_ms": at_ms - late_ms, "consumer": WORKERS[0]}
        for number, (event, after) in enumerate((("delivered", 0), ("acked", 40))):
            id_in_stream = f"{min(at_ms + after, now_ms)}-{number}"
            client.xadd(key, told(id, event=event, **known), id=id_in_stream)


def _in_flight(app: Celery, store: Store) -> None:
    for queue, worker, count in zip(("mail", "mail", "billing"), WORKERS, (6, 4, 3), strict=True):
        for n in range(count + 2):
            app.send_task(TASKS[queue][0], [n], queue=queue, headers={"tenant": "acme"})
        store.deliver(queue, worker, count, 1, lease_ms=LEASE_MS)


def _dead(app: Celery, store: Store, chance: random.Random) -> None:
    tag = 1_000
    for name, reason, count in REASONS:
        queue = name.partition(".")[0]
        worker = WORKERS[2] if queue == "billing" else WORKERS[0]
        for _ in range(count):
            given = {"tenant": chance.choice(TENANTS)}
            app.send_task(name, [chance.randrange(9_999)], queue=queue, headers=given, priority=0)
            found = store.deliver(queue, worker, 1, tag := tag + 1, lease_ms=LEASE_MS)
            assert found is not None
            id = open_envelope(found.records[0][1:], 0).id
            text = reason.replace("4711", str(chance.randrange(1_000, 9_999)))
            store.bury(queue, worker, [(tag, id, text, b"")], _attempts(text))


def _attempts(error: str) -> str:
    now_ms, frame = int(time.time() * 1000), '  File "shop/billing.py", line 88, in charge\n'
    return write(
        Failure(n, now_ms - (4 - n) * 1_500, WORKERS[2], error, frame + "    answer = post(card)\n")
        for n in range(1, 4)
    )


def _outcomes(store: Store, chance: random.Random) -> None:
    """Records by workers: failures by kind, retries and running tasks."""
    now_ms, outcomes = int(time.time() * 1000), Outcomes(store)
    number = 0
    for name, error, message, count in FAILURES:
        queue = name.partition(".")[0]
        for _ in range(count):
            number += 1
            at_ms = now_ms - chance.randrange(5_000, 3_600_000)
            text = message.replace("4711", str(chance.randrange(1_000, 9_999)))
            facts = {"error": error, "message": text, "attempts": 4, "run_ms": 412, **RECORDED}
            facts["args"] = f"({chance.randrange(10_000, 99_999)},)"
            rows: list[Any] = []
            for retries in range(4):
                began = at_ms - (3 - retries) * 60_000
                rows += _began(began, retries)
                following = {**facts, "next_ms": began + 60_000}
                last = ["-", began + 412, 3, facts]
                rows.append(last if retries == 3 else ["~", began + 412, retries, following])
                if retries == 1 and number % 4 == 0:  # it waits for its third try
                    rows[-1] = ["~", now_ms - 20_000, 1, {**facts, "next_ms": now_ms + 40_000}]
                    break
            _note(store, outcomes, queue, f"failed-{number}", name, rows)
    for number, queue in enumerate(("billing", "mail", "mail", "default")):
        rows = _began(now_ms - 7_000 * (number + 1) ** 3, 0)
        _note(store, outcomes, queue, f"runs-{number}", TASKS[queue][number % 3], rows)


def _trends(store: Store, chance: random.Random) -> None:
    """Counts by workers over the last week: spread over each day, failures in bursts."""
    now = int(time.time())
    times = [*range(now - 604_000, now - 3_600, 900), *range(now - 3_600, now - 60, 60)]
    for queue, names in TASKS.items():
        for start in range(0, len(times), 200):
            tallies = Tallies()
            for at in times[start : start + 200]:
                busy = 1.2 + math.sin((at % 86_400 / 86_400 - 0.3) * 2 * math.pi)
                for name in names:
                    count = busy * chance.randrange(2, 9) / (15 if at >= now - 3_600 else 1)
                    _count(tallies, name, at, int(count + chance.random()), chance)
            store.all_of(tallies.calls(store, queue, f"shop-{start}:1:a"))


def _count(tallies: Tallies, name: str, at: int, count: int, chance: random.Random) -> None:
    is_down = name == "billing.charge" and at // 7_200 % 9 == 0
    for _ in range(count):
        failed = chance.random() < (0.3 if is_down else 0.004)
        tallies.began(name, at, chance.lognormvariate(2.5, 1.2))
        tallies.ended(name, at, "-" if failed else "+", chance.lognormvariate(5, 1))
        if failed:
            tallies.ended(name, at, "~", 400)


def _began(at_ms: int, retries: int) -> list[Any]:
    return [["r", at_ms - 40, retries, WORKERS[2]], ["s", at_ms, retries, WORKERS[2], 77, 0]]


def _note(
    store: Store, outcomes: Outcomes, queue: str, id: str, task: str, rows: list[Any]
) -> None:
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    note = Note(id, rows[-1][0], rows[-1][1], False, f'["t","{task}","acme"]\n', lines)
    for call in outcomes.note_calls(queue, [note], Kept(1_000, 86_400_000), WORKERS[2], 3_600_000):
        store.all_of([call])


def _known(app: Celery) -> str:
    delayed, id = Delayed(app), "order-20931"
    options = {"queue": "billing", "countdown": 86_400, "headers": {"tenant": "globex"}}
    app.send_task("billing.renew", [20931], {"plan": "team", "seats": 12}, task_id=id, **options)
    delayed.reschedule(id, countdown=3 * 86_400, queue="billing")
    delayed.reschedule(id, countdown=5 * 86_400 + 7_260, queue="billing")
    delayed.close()
    return id
