"""The clock of the test kit moves policies, too: written as a user's tests would be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

pytest_plugins = "pytester"

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "policies.md"
BLOCK = re.compile(r'^```python(?: title="(.*?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
#: Examples that need the app's own broker.
ASKS = re.compile(r"\bapp\.(send_task|delayed)\b")

#: An app with a queue for each policy, and what its tests begin with.
SHOP = """
    import pytest
    from celery import Celery
    from celery_ext import install
    from celery_ext.policies import (
        Backoff, Delay, Drain, DropOlder, Latest, Limit, Policy, Run, Spread, Timeout, Window,
    )

    class Tomorrow(Policy):
        def decide(self, message):
            seen.append((message.now_ms, message.due_ms))
            if "seen" in message.marks:
                return Run()
            return Delay(message.now_ms + 86_400_000, "tomorrow", "seen")

    app = Celery("shop", broker="amqp://nowhere.invalid")
    app.conf.broker_transport_options = {
        # Workers must be woken: they would not poll within the time of these tests.
        "delayed_poll_seconds": 60,
        "delayed_policies": {
            "office": [Window("08:00-18:00", tz="Europe/Berlin", days="mon-fri")],
            "timeout": [Timeout("1h")],
            "drop": [DropOlder("1h")],
            "spread": [Spread("10h", after="1h")],
            "latest": [Latest(by="key", after="1h", gather="5m")],
            "rate": [Limit(rate="1/h", burst=2)],
            "drain": [Drain("1/h", after="2h")],
            "slots": [Limit(concurrency=1)],
            "back": [Backoff([3600, 7200], max_age="2h")],
            "own": [Tomorrow()],
        },
    }
    install(app)
    ran, seen = [], []

    @app.task
    def note(name):
        ran.append(name)
        if name == "fails":
            raise ValueError(name)

    @pytest.fixture
    def send(delayed_app):
        def send(queue, name, **options):
            note.apply_async((name,), queue=queue, **options)
        ran.clear(), seen.clear()
        return send

    @pytest.fixture(scope="session")
    def delayed_celery_app():
        return app

    @pytest.fixture
    def delayed_worker_options():
        return {"queues": [*app.conf.broker_transport_options["delayed_policies"]]}

    @pytest.fixture
    def work(request, delayed_clock):
        def work():
            request.getfixturevalue("delayed_worker")
            delayed_clock.wait_until_done(60)
            done = sorted(ran)
            ran.clear()
            return done
        return work
"""


def run(pytester: pytest.Pytester, tests: str) -> pytest.RunResult:
    pytester.makeconftest(SHOP)
    pytester.makepyfile(test_shop=tests)
    pytester.makeini("[pytest]\npythonpath = .\n")
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=120)


def test_windows(pytester: pytest.Pytester) -> None:
    found = run(
        pytester,
        """
        def test_opens(work, send, delayed_clock):
            delayed_clock.set("2040-03-05T20:00+01:00")  # a Monday
            send("office", "a")
            send("office", "b", countdown=3600)
            send("office", "c", countdown=24 * 3600)
            assert delayed_clock.advance(hours=11, minutes=59) == 0
            assert work() == []
            assert delayed_clock.advance(minutes=1) == 2
            assert work() == ["a", "b"]
            assert delayed_clock.advance(hours=23, minutes=59) == 0
            assert work() == []
            assert delayed_clock.advance(minutes=1) == 1
            assert work() == ["c"]

        def test_is_open(work, send, delayed_clock):
            delayed_clock.set("2040-03-05T10:00+01:00")
            send("office", "a")
            send("office", "b", countdown=3600)
            assert work() == ["a"]
            assert delayed_clock.advance(hours=1) == 1
            assert work() == ["b"]

        def test_closes_before_a_worker_comes(work, send, delayed_clock):
            delayed_clock.set("2040-03-09T17:00+01:00")  # a Friday
            send("office", "a")
            delayed_clock.advance(hours=1)
            assert work() == []
            delayed_clock.set("2040-03-12T07:59+01:00")
            assert work() == []
            delayed_clock.set("2040-03-12T08:00+01:00")
            assert work() == ["a"]
        """,
    )
    found.assert_outcomes(passed=3)


def test_late_tasks(pytester: pytest.Pytester) -> None:
    found = run(
        pytester,
        """
        import pytest
        from conftest import seen

        @pytest.mark.parametrize("queue", ["drop", "timeout"])
        def test_too_late(queue, work, send, delayed_clock, delayed_broker):
            send(queue, "now")
            send(queue, "later", countdown=3600)
            send(queue, "last", countdown=2 * 3600 + 60)
            delayed_clock.advance(hours=2, minutes=1)
            assert work() == ["last"]
            assert len(delayed_broker.dump(queue)["dead"]) == (2 if queue == "timeout" else 0)

        @pytest.mark.parametrize("queue", ["drop", "timeout", "spread", "latest"])
        def test_what_is_sent_after_an_advance_is_not_late(queue, work, send, delayed_clock):
            delayed_clock.advance(days=3)
            send(queue, "a")
            send(queue, "b", countdown=60)
            assert delayed_clock.advance(minutes=1) == 1
            assert work() == ["a", "b"]

        def test_spread(work, send, delayed_clock, delayed_broker):
            for _ in range(5):
                send("spread", "late", countdown=60)
            send("spread", "in time", countdown=2 * 3600)
            delayed_clock.advance(hours=2)
            assert work() == ["in time"]
            assert len(delayed_broker.dump("spread")["delayed"]) == 5
            delayed_clock.advance(hours=10)
            assert work() == ["late"] * 5

        def test_latest(work, send, delayed_clock):
            for hours in (1, 2, 3):
                send("latest", hours, countdown=hours * 3600, headers={"key": "k"})
            delayed_clock.advance(hours=5)
            assert work() == []
            assert delayed_clock.advance(minutes=5) == 3
            assert work() == [3]

        def test_own_policy(work, send, delayed_clock):
            delayed_clock.set("2040-03-05T20:00Z")
            send("own", "a", countdown=60)
            delayed_clock.advance(minutes=1)
            assert work() == []
            delayed_clock.advance(hours=23)
            assert work() == []
            delayed_clock.advance(hours=1)
            assert work() == ["a"]
            (now_ms, due_ms), (later_ms, still_ms) = seen
            assert still_ms == due_ms
            assert 2_214_590_400_000 <= due_ms <= now_ms
            assert later_ms - now_ms >= 86_400_000
        """,
    )
    found.assert_outcomes(passed=9)


def test_limits(pytester: pytest.Pytester) -> None:
    found = run(
        pytester,
        """
        def test_rate(work, send, delayed_clock):
            for name in "abcd":
                send("rate", name)
            assert work() == ["a", "b"]
            delayed_clock.advance(minutes=59)
            assert work() == []
            delayed_clock.advance(minutes=1)
            assert work() == ["c"]
            delayed_clock.advance(hours=1)
            assert work() == ["d"]

        def test_tokens_come_back(work, send, delayed_clock):
            for names in ("ab", "cd"):
                for name in names:
                    send("rate", name)
                assert work() == [*names]
                delayed_clock.advance(hours=2)

        def test_drain(work, send, delayed_clock):
            for name in "abc":
                send("drain", name, countdown=60)
            delayed_clock.advance(hours=3)
            assert work() == ["a"]
            delayed_clock.advance(hours=1)
            assert work() == ["b"]
            delayed_clock.advance(hours=1)
            assert work() == ["c"]

        def test_drain_lets_through_what_is_not_late(work, send, delayed_clock):
            for name in "abc":
                send("drain", name, countdown=60)
            delayed_clock.advance(hours=2)
            assert work() == ["a", "b", "c"]

        def times(app, client):
            # When messages at the gate were due, wherever it is written.
            keys = client.scan_iter("{rate}:*", _type="zset")
            places = sorted(k for k in keys if b":waiting" in k or b":lane:" in k or b"|" in k)
            found = [client.zrange(key, 0, -1, withscores=True) for key in places]
            scores = [round(score) for each in found for _, score in each]
            scores += sorted(info.due_ms for info in app.delayed.find(queue="rate"))
            return len(places), scores

        def test_gate_moves_as_a_whole(work, send, delayed_clock, delayed_app, delayed_broker):
            for name in "abcde":
                send("rate", name)
            work()
            count, before = times(delayed_app, delayed_broker.client)
            assert (count, len(before)) == (3, 3 + 3 + 1 + 3)
            delayed_clock.advance(minutes=30)
            assert times(delayed_app, delayed_broker.client)[1] == [ms - 1_800_000 for ms in before]
            delayed_clock.reset()
            assert times(delayed_app, delayed_broker.client) == (3, before)

        def test_slots(work, send, delayed_clock):
            for name in "abc":
                send("slots", name)
            assert work() == ["a", "b", "c"]

        def test_a_limit_that_was_set_ends(work, send, delayed_clock, delayed_app):
            delayed_app.delayed.set_limit("rate", rate="1/d", burst=1, for_="2h", why="")
            for name in "abc":
                send("rate", name)
            assert work() == ["a"]
            delayed_clock.advance(hours=1, minutes=59)
            assert work() == []
            delayed_clock.advance(minutes=1)
            assert work() == []  # the declared rate begins without tokens
            delayed_clock.advance(hours=1)
            assert work() == ["b"]

        def test_a_pause_ends(work, send, delayed_clock, delayed_app):
            delayed_app.delayed.pause("rate", for_="1h", why="")
            delayed_clock.advance(minutes=59)
            send("rate", "a")
            delayed_clock.advance(minutes=1)
            assert work() == ["a"]

        def test_the_pause_of_a_part_ends(work, send, delayed_clock, delayed_app):
            delayed_clock.advance(hours=3)
            delayed_app.delayed.pause("slots", task="*.note", for_="1h")
            send("slots", "a")
            assert work() == []
            delayed_clock.advance(minutes=59)
            assert work() == []
            assert len(delayed_app.delayed.pauses("slots")) == 1
            delayed_clock.advance(minutes=1)
            assert work() == ["a"]
            assert delayed_app.delayed.pauses("slots") == []

        def test_reset(work, send, delayed_clock):
            for name in "abc":
                send("rate", name)
            delayed_clock.advance(hours=5)
            assert work() == ["a", "b"]
            delayed_clock.reset()
            delayed_clock.advance(hours=1)
            assert work() == ["c"]
        """,
    )
    found.assert_outcomes(passed=10)


def test_retries(pytester: pytest.Pytester) -> None:
    found = run(
        pytester,
        """
        def test_pauses(work, send, delayed_clock, delayed_broker):
            send("back", "fails")
            assert work() == ["fails"]
            delayed_clock.advance(minutes=59)
            assert work() == []
            delayed_clock.advance(minutes=1)
            assert work() == ["fails"]
            (letter,) = delayed_broker.dump("back")["dead"]  # as 1h + 2h is more than 2h
            assert letter["reason"].startswith("not retried for longer than 2h")

        def test_real_time_again():
            from kombu_delayed.message import clock
            assert clock.ahead_ms == 0
        """,
    )
    found.assert_outcomes(passed=2)


def test_examples_of_the_guide(pytester: pytest.Pytester) -> None:
    blocks = BLOCK.findall(GUIDE.read_text(encoding="utf-8"))
    declared = [code for title, code in blocks if not title and not ASKS.search(code)]
    tests = [code for title, code in blocks if title]
    assert max(map(len, map(str.splitlines, tests[1:]))) <= 10
    shop = "".join(declared).replace("redis://localhost:6379/1", "cache+memory://")
    pytester.makepyfile(shop=shop, test_policies="\n\n".join(tests))
    pytester.makeini("[pytest]\npythonpath = .\ndelayed_celery_app = shop:app\n")
    found = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=120)
    found.assert_outcomes(passed=len(tests) - 1)
