"""Retry strategies: uncaught errors, self.retry, autoretry_for, and the last failure."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, states

from celery_ext import UniqueTask, unique_headers
from celery_ext.policies import (
    Attempt,
    Backoff,
    GiveUp,
    PolicyError,
    Retry,
    RetryStrategy,
    Timeout,
)
from celery_ext.policies.retry.strategies import FIRST_HEADER
from celery_ext.policies.steps import Policies, apply
from kombu_delayed.message import clock
from tests.kit.extended import Bench
from tests.kit.policed import OpenApp, run_next, take
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    ("strategy", "pauses"),
    [
        (Backoff(10), [10, 20, 40, 80, 160]),
        (Backoff(10, longest=60), [10, 20, 40, 60, 60]),
        (Backoff(7, factor=1, retries=3), [7, 7, 7]),
        (Backoff([1, 60, 3]), [1, 60, 3]),
        (Backoff([60, 3600, 86_400]), [60, 3600, 86_400]),
        (Backoff([60, 3600, 86_400], longest=7200), [60, 3600, 7200]),
        (Backoff(1800, retries=3), [1800, 3600, 3600]),
        (Backoff(7200, retries=2), [7200, 7200]),
        (Backoff([1, 2], retries=4), [1, 2, 2, 2]),
        (Backoff(10, retries=0), []),
    ],
)
def test_pauses(strategy: Backoff, pauses: list[float]) -> None:
    message = Attempt("a", "t", "q", (), {}, {}, 1_000)
    error = ValueError("no")
    for attempt, pause in enumerate(pauses, 1):
        assert strategy.next(message, error, attempt) == Retry(1_000 + pause * 1000)
    last = strategy.next(message, error, len(pauses) + 1)
    times = f"{len(pauses) + 1} times, at last" if pauses else "once"
    assert last == GiveUp(f"failed {times} with ValueError: no")


@pytest.mark.parametrize(
    ("now_ms", "answer"),
    [
        (1_000, Retry(11_000)),
        (6_000, Retry(16_000)),
        (6_001, GiveUp("not retried for longer than 15s, at last ValueError: no")),
    ],
)
def test_age(now_ms: int, answer: Retry | GiveUp) -> None:
    strategy = Backoff(10, factor=1, max_age="15s")
    message = Attempt("a", "t", "q", (), {}, {}, now_ms, first_failure_ms=1_000)
    assert strategy.next(message, ValueError("no"), 2) == answer


def test_age_is_that_of_the_first_failure(app: Celery) -> None:
    @app.task(name="ages", shared=False, policies=[Backoff([10, 20], max_age="1h")])
    def ages() -> None:
        raise ValueError("no")

    id, found = ages.delay().id, []
    for _ in range(2):
        assert run_next(app) == states.RETRY
        found.append(app.delayed.get(id).headers[FIRST_HEADER])
    assert found[0] == found[1] <= time.time() * 1000
    assert run_next(app) == states.FAILURE
    (letter,) = app.delayed.dead.list()
    assert FIRST_HEADER not in letter.info.headers


def reject_and_replay(app: Celery, id: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reject a retry, and replay its dead letter two days later."""
    app.delayed.run_now(id)
    with app.connection_for_read() as connection:
        connection.default_channel.basic_get(queue).reject()
    monkeypatch.setattr(clock, "ahead_ms", 2 * 86_400_000)
    assert app.delayed.dead.replay([id]) == 1


def test_a_replay_of_what_was_rejected_as_a_retry_starts_again(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = [Timeout("1h", max_age="1d"), Backoff([10, 20], max_age="1d")]

    @app.task(name="ages", shared=False, policies=policies)
    def ages() -> None:
        raise ValueError("no")

    id = ages.delay().id
    assert run_next(app) == states.RETRY
    reject_and_replay(app, id, "celery", monkeypatch)
    ends = [run_next(app) for _ in range(3)]
    assert ends == [states.RETRY, states.RETRY, states.FAILURE]
    (letter,) = app.delayed.dead.list()
    assert [each.attempt for each in letter.failures] == [1, 2, 3]


@pytest.mark.parametrize("app", [[Timeout("1h", max_age="1d")]], indirect=True)
def test_a_replay_starts_again_where_there_is_no_timeout(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(name="slows", bind=True, shared=False, policies=[Backoff([10, 20])])
    def slows(self: Any) -> None:
        raise self.retry(exc=ValueError("no"), queue="slow")

    app.amqp.queues.add("slow")
    id = slows.delay().id
    assert run_next(app) == states.RETRY
    reject_and_replay(app, id, "slow", monkeypatch)
    ends = [run_next(app, "slow") for _ in range(3)]
    assert ends == [states.RETRY, states.RETRY, states.FAILURE]
    (letter,) = app.delayed.dead.list()
    assert [each.attempt for each in letter.failures] == [1, 2, 3]


@pytest.mark.parametrize("app", [[Timeout("1h")]], indirect=True)
@pytest.mark.parametrize("policies", [[], [Backoff([10])]], ids=["Celery's", "a strategy"])
@pytest.mark.parametrize("given", [{}, {"time_limit": 30}], ids=str)
def test_the_rest_of_a_timeout_is_no_limit_of_the_next_attempt(
    app: Celery, policies: list[Any], given: dict[str, Any]
) -> None:
    @app.task(name="moves", bind=True, shared=False, policies=policies)
    def moves(self: Any) -> None:
        raise self.retry(exc=ValueError("no"), queue="slow", **given)

    app.amqp.queues.add("slow")
    id = moves.apply_async(time_limit=7200, headers={"tenant": "ada"}).id
    assert run_next(app) == states.RETRY
    info = app.delayed.get(id)
    assert (info.queue, info.tenant) == ("slow", "ada")
    assert info.headers["timelimit"] == [given.get("time_limit", 7200), None]
    # Back there, its own limits count, also those that the attempt before has set.
    assert app.delayed.redirect(id, "celery")
    app.delayed.run_now(id)
    hard, soft = take(app).headers["timelimit"]
    assert (round(hard), soft) == (given.get("time_limit", 3600), None)


@pytest.mark.parametrize("app", [[Timeout("1h"), Backoff([10], retries=0)]], indirect=True)
def test_the_rest_of_a_timeout_is_no_limit_of_a_dead_letter(app: Celery) -> None:
    @app.task(name="fails", shared=False)
    def fails() -> None:
        raise ValueError("no")

    fails.apply_async(time_limit=7200)
    assert run_next(app) == states.FAILURE
    (letter,) = app.delayed.dead.list()
    assert letter.info.headers["timelimit"] == [7200, None]


def test_jitter() -> None:
    message = Attempt("a", "t", "q", (), {}, {}, 0)
    strategy = Backoff(10, jitter=0.5)
    found = [strategy.next(message, ValueError(), 1) for _ in range(200)]
    times = [each.at_ms for each in found if isinstance(each, Retry)]
    assert 5_000 <= min(times) < 8_000
    assert 12_000 < max(times) <= 15_000


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ("soon", {}, "takes seconds, or a list of them, not 'soon'"),
        ([], {}, r"not \[\]"),
        ([1, -1], {}, r"not \[1, -1\]"),
        (10, {"factor": 0.5}, r"Backoff\(factor=0.5\) takes 1 to 1,000"),
        (10, {"jitter": 2}, r"Backoff\(jitter=2\)"),
        (10, {"retries": True}, r"Backoff\(retries=True\)"),
        (10, {"retries": 1.5}, r"Backoff\(retries=1.5\) takes a whole number"),
        (10, {"longest": "1h"}, r"Backoff\(longest='1h'\)"),
        (10, {"jitter": None}, r"Backoff\(jitter=None\)"),
        ([10, float("inf")], {}, r"Backoff takes seconds, or a list of them, not \[10, inf\]"),
    ],
)
def test_what_cannot_be_meant(given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Backoff(given, **options)


@pytest.fixture
def app(open_app: OpenApp, request: pytest.FixtureRequest) -> Celery:
    return open_app(*getattr(request, "param", []))


def test_an_uncaught_error(app: Celery) -> None:
    @app.task(name="fails", shared=False, policies=[Backoff(10, retries=2)])
    def fails(n: int) -> None:
        raise ValueError(f"no {n}")

    result = fails.apply_async((7,), headers={"tenant": "ada"}, priority=3)
    for pause in (10, 20):
        assert run_next(app) == states.RETRY
        info = app.delayed.get(result.id)
        assert timedelta(seconds=pause - 5) < info.remaining <= timedelta(seconds=pause)
        assert (info.tenant, info.args, info.priority) == ("ada", "(7,)", 3)
        assert app.delayed.dead.show(result.id) is None
    assert run_next(app) == states.FAILURE
    assert result.state == states.FAILURE
    assert app.delayed.counts()["celery"].delayed == 0
    letter = app.delayed.dead.show(result.id)
    assert letter.letter.reason == "failed 3 times, at last with ValueError: no 7"
    assert [each.attempt for each in letter.failures] == [1, 2, 3]
    first = letter.failures[0]
    assert (first.worker, first.error) == ("w1@test", "ValueError: no 7")
    assert 'raise ValueError(f"no {n}")' in first.traceback
    assert letter.at - first.at < timedelta(seconds=60)
    assert letter.info.consumer.startswith("w1@test:")

    # A replay starts again with all attempts and without the history.
    app.delayed.dead.replay([result.id])
    info = app.delayed.get(result.id)
    assert (info.headers["retries"], info.headers.get("delayed_failures")) == (0, None)
    assert (info.tenant, info.priority) == ("ada", 3)
    assert [run_next(app) for _ in range(3)] == [states.RETRY, states.RETRY, states.FAILURE]
    again = app.delayed.dead.show(result.id)
    assert len(again.failures) == 3


@pytest.mark.parametrize("until", [None, "finished"])
@pytest.mark.parametrize("conflict", ["refuse", "debounce"])
@pytest.mark.parametrize("base", [None, UniqueTask])
def test_a_unique_task_is_buried(app: Celery, until: Any, conflict: str, base: Any) -> None:
    """It is buried instead of being sent again for ever."""

    @app.task(name="fails", shared=False, base=base, policies=[Backoff(10, retries=1)])
    def fails() -> None:
        raise ValueError("no")

    result = fails.apply_async(headers=unique_headers("key", conflict, until))
    assert [run_next(app) for _ in range(2)] == [states.RETRY, states.FAILURE]
    counts = app.delayed.counts()["celery"]
    assert (counts.delayed, counts.ready, counts.dead) == (0, 0, 1)
    letter = app.delayed.dead.show(result.id)
    assert letter.letter.reason == "failed 2 times, at last with ValueError: no"
    assert b"delayed_unique" not in letter.info.message
    app.delayed.dead.replay([result.id])
    assert [run_next(app) for _ in range(2)] == [states.RETRY, states.FAILURE]
    assert len(app.delayed.dead.show(result.id).failures) == 2


AUTORETRY = {"policies": [Backoff([10, 20])], "autoretry_for": (Exception,)}


@pytest.mark.parametrize(
    ("app", "options", "ends", "dead"),
    [
        ([], {}, [states.FAILURE], 0),
        ([Backoff(10, retries=2)], {}, [states.RETRY, states.RETRY, states.FAILURE], 1),
        ([Backoff(10)], {"policies": [Backoff(10, retries=0)]}, [states.FAILURE], 1),
        ([], AUTORETRY, [states.RETRY, states.RETRY, states.FAILURE], 1),
        ([], {**AUTORETRY, "dont_autoretry_for": (ValueError,)}, [states.FAILURE], 0),
    ],
    ids=["Celery's", "of a queue", "of a task in such a queue", "autoretry", "not to retry"],
    indirect=["app"],
)
def test_a_task_that_always_fails(
    app: Celery, options: dict[str, Any], ends: list[str], dead: int
) -> None:
    @app.task(name="fails", shared=False, **options)
    def fails() -> None:
        raise ValueError("no")

    result = fails.delay()
    assert run_next(app) == ends[0]
    if ends[0] == states.RETRY:
        remaining = app.delayed.get(result.id).remaining
        assert timedelta(seconds=5) < remaining <= timedelta(seconds=10)
    assert [run_next(app) for _ in ends[1:]] == ends[1:]
    assert len([*app.delayed.dead.list()]) == dead


def test_self_retry(app: Celery) -> None:
    @app.task(name="asks", shared=False, bind=True, max_retries=0, policies=[Backoff([10, 20])])
    def asks(self: Any, **more: Any) -> None:
        try:
            raise KeyError("x")
        except KeyError as error:
            raise self.retry(exc=error, **more) from error

    result = asks.delay()
    assert [run_next(app) for _ in range(3)] == [states.RETRY, states.RETRY, states.FAILURE]
    (letter,) = app.delayed.dead.list()
    assert letter.info.id == result.id
    assert len(letter.failures) == 3
    assert "KeyError" in letter.letter.reason

    # Explicit arguments of a retry take precedence.
    result = asks.delay(countdown=3000)
    assert run_next(app) == states.RETRY
    assert app.delayed.get(result.id).remaining > timedelta(seconds=2900)
    app.delayed.cancel(result.id)
    asks.delay(max_retries=0)
    assert run_next(app) == states.FAILURE


def test_a_strategy_of_one_s_own(app: Celery) -> None:
    class Elsewhere(RetryStrategy):
        def next(self, message: Attempt, error: BaseException, attempt: int) -> Retry | GiveUp:
            if isinstance(error, KeyError):
                return GiveUp(f"{message.queue} {message.args} has no key")
            args = [message.args[0] + 1]
            return Retry(message.now_ms + 5_000, {"args": args, "priority": 9})

    @app.task(name="own", shared=False, policies=[Elsewhere()])
    def own(n: int) -> None:
        raise KeyError("k") if n == 2 else ValueError("no")

    result = own.delay(1)
    assert run_next(app) == states.RETRY
    info = app.delayed.get(result.id)
    assert (info.args, info.priority) == ("(2,)", 9)
    assert run_next(app) == states.FAILURE
    letter = app.delayed.dead.show(result.id)
    assert letter.letter.reason == "celery [2] has no key"


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "later",
        Retry("soon"),  # type: ignore[arg-type]
        Retry(0, {"max_retries": 3}),
        Retry(0, {"headers": "tenant"}),
        Retry(0, {"kwargs": [1]}),
        Retry(0, {"serializer": "unknown"}),
        Retry(0, {"policies": ["late"]}),
    ],
)
def test_a_strategy_that_fails_loses_nothing(app: Celery, wrong: Any) -> None:
    class Broken(RetryStrategy):
        def next(self, message: Attempt, error: BaseException, attempt: int) -> Any:
            return wrong

    @app.task(name="broken", shared=False, policies=[Broken()])
    def broken() -> None:
        raise KeyError("k")

    result = broken.delay()
    assert run_next(app) == states.FAILURE
    assert isinstance(result.result, KeyError)
    letter = app.delayed.dead.show(result.id)
    assert letter.letter.reason.startswith("its retry strategy has failed: ")
    assert "Reject" not in letter.letter.reason  # Celery's, around the error


def test_a_called_task_just_raises(app: Celery) -> None:
    @app.task(name="fails", shared=False, policies=[Backoff(10)])
    def fails() -> None:
        raise ValueError("no")

    apply(app)
    with pytest.raises(ValueError, match="no"):
        fails()
    assert fails.apply().state == states.FAILURE


def test_celery_waits_for_a_chord_as_long_as_it_takes(open_app: OpenApp) -> None:
    """It looks for the results again and again, by a retry, if the backend cannot join them."""
    app = open_app(Backoff([10]))
    given = {"interval": 1, "result": [[["never", None], None]]}
    app.tasks["celery.chord_unlock"].apply_async(("group", app.signature("add")), given)
    assert [run_next(app) for _ in range(3)] == [states.RETRY] * 3


def test_workers_of_any_app_follow_policies(server: Server) -> None:
    with make_app(Settings(f"delayed+{server.url}")) as app:
        app.finalize()
        assert Policies in app.steps["worker"]


def test_what_is_no_list_of_policies(app: Celery) -> None:
    @app.task(name="wrong", shared=False, policies=["late"])
    def wrong() -> None: ...

    with pytest.raises(PolicyError, match="task wrong: 'late' is not a policy"):
        apply(app)


@pytest.mark.smoke
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_workers(bench: Bench, pool: str) -> None:
    with bench.worker(module="tests.kit.policies_app", pool=pool) as worker:
        assert ("the pool threads cannot end a running task" in worker.log) == (pool == "threads")
        names = ("hopeless", "hopeless_late", "hopeless_kept")
        for name in names:
            bench.send(name, 0, f"tests.kit.policies_app.{name}", args=["s3cret"])
        wait_until(lambda: bench.app.delayed.counts()["celery"].dead >= 3, "they are dead letters")
        wait_until(lambda: not bench.app.delayed.counts()["celery"].unacked, "all are acked")
    assert {len(bench.ledger.of(name)) for name in names} == {3}
    for letter in bench.app.delayed.dead.list():
        assert [each.error for each in letter.failures] == ["ValueError: no hope"] * 3
        assert {each.worker for each in letter.failures} == {"w1@test"}
    counts = bench.app.delayed.counts()["celery"]
    assert (counts.delayed, counts.ready, counts.unacked, counts.dead) == (0, 0, 0, 3)
    shown = bench.run_celery("delayed", "dead", "show", "hopeless")
    assert "attempt 3" in shown
    assert "ValueError: no hope" in shown
    data = json.loads(bench.run_celery("delayed", "dead", "show", "hopeless", "--json"))
    assert [each["attempt"] for each in data["failures"]] == [1, 2, 3]


@pytest.mark.smoke
@pytest.mark.parametrize("error", ["OwnPickle", "NoPickle"])
def test_an_error_that_loses_its_attributes_is_one_dead_letter(bench: Bench, error: str) -> None:
    with bench.worker(module="tests.kit.policies_app", pool="prefork"):
        bench.send("a", 0, "tests.kit.policies_app.hopeless_pickle", args=[error])
        wait_until(lambda: bench.app.delayed.counts()["celery"].dead, "it is a dead letter")
        wait_until(lambda: not bench.app.delayed.counts()["celery"].unacked, "it is acked")
    (letter,) = bench.app.delayed.dead.list()
    assert [each.error for each in letter.failures] == [f"{error}: no hope"] * 2


@pytest.mark.smoke
@pytest.mark.parametrize("when", ["", "_late", "_kept"])
@pytest.mark.parametrize(
    ("task", "error"),
    [("endless_again", "TimeLimitExceeded: "), ("killed", "WorkerLostError: ")],
)
def test_a_task_whose_process_has_ended_follows_its_strategy(
    bench: Bench, task: str, error: str, when: str
) -> None:
    with bench.worker(module="tests.kit.policies_app", pool="prefork") as worker:
        bench.send("a", 0, f"tests.kit.policies_app.{task}{when}")
        wait_until(lambda: [*bench.app.delayed.dead.list()] != [], "it is a dead letter", 60)
        result = bench.result("a")
        wait_until(lambda: result.state == "FAILURE", "it has failed")
        worker.wait_for_log("retry: ")
    assert len(bench.ledger.of("a")) == 3
    letter = bench.app.delayed.dead.show("a")
    assert [each.attempt for each in letter.failures] == [1, 2, 3]
    assert [each.error[: len(error)] for each in letter.failures] == [error] * 3
    assert letter.letter.reason.startswith(f"failed 3 times, at last with {error}")
    counts = bench.app.delayed.counts()["celery"]
    assert (counts.delayed, counts.ready, counts.unacked, counts.dead) == (0, 0, 0, 1)


@pytest.mark.parametrize("pool", ["solo", "prefork"])
def test_an_error_that_cannot_say_what_it_is(bench: Bench, pool: str) -> None:
    with bench.worker(pool=pool):
        for name, more in (("plain", {}), ("retried", {"policies": [Backoff([0.01])]})):
            bench.app.send_task("unspeakable", task_id=name, **more)
        wait_until(lambda: bench.result("plain").state == "FAILURE", "it has failed")
        wait_until(lambda: bench.app.delayed.counts()["celery"].dead, "it is a dead letter")
        bench.send("after", 0)
        bench.ledger.wait_for_all(["after"])
        recorded = bench.app.delayed.recorded
        wait_until(lambda: "plain" in [each.id for each in recorded("failed")], "it is recorded")
    letter = bench.app.delayed.dead.show("retried").letter
    assert letter.reason.endswith("UnspeakableError: (its text cannot be made: RuntimeError)")


@pytest.mark.parametrize(
    ("pool", "name", "args", "reason"),
    [
        ("solo", "fail_kept", ["fail"], "ValueError: no hope"),
        ("prefork", "fail_kept", ["fail"], "ValueError: no hope"),
        ("prefork", "fail_kept", ["die"], "WorkerLostError: Worker exited prematurely"),
        ("solo", "fail_kept", [""], "UnspeakableError: (its text cannot be made: RuntimeError)"),
        ("solo", "reject_unspeakable", [], "(its text cannot be made: RuntimeError)"),
        ("prefork", "reject_unspeakable", [], "(its text cannot be made: RuntimeError)"),
    ],
)
def test_a_dead_letter_says_why_its_task_has_failed(
    bench: Bench, pool: str, name: str, args: list[str], reason: str
) -> None:
    with bench.worker(pool=pool):
        bench.app.send_task(name, args, task_id="a")
        wait_until(lambda: bench.app.delayed.counts()["celery"].dead, "it is a dead letter", 60)
        bench.send("after", 0)
        bench.ledger.wait_for_all(["after"])
    (letter,) = bench.app.delayed.dead.list()
    assert letter.letter.reason.startswith(reason)


@pytest.mark.smoke
def test_what_is_tried_again_after_its_limit_has_not_failed(bench: Bench) -> None:
    with bench.worker(module="tests.kit.policies_app", pool="prefork"):
        result = bench.send("a", 0, "tests.kit.policies_app.endless_once")
        assert result.get(timeout=60) == 7

        def events() -> list[str]:
            history = bench.app.delayed.history("a")
            return [step.event for step in history.steps] if history else []

        wait_until(lambda: events()[-1:] == ["succeeded"], "its end is recorded")
    attempt = ["received", "started"]
    assert events() == [*attempt, "retrying", *attempt, "succeeded"]


@pytest.mark.smoke
@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_pool_that_cannot_end_tasks_says_which_took_too_long(bench: Bench, pool: str) -> None:
    with bench.worker(module="tests.kit.policies_app", pool=pool) as worker:
        bench.app.send_task("sleep", (0.3,), task_id="long", time_limit=0.2)
        bench.send("short", 0)
        worker.wait_for_log("Task sleep[long] ran for 0.")
        bench.ledger.wait_for_all(["short"])
        wait_until(lambda: overran(bench, "long"), "it is recorded")
        assert not overran(bench, "short")
        assert [each.id for each in bench.app.delayed.recorded("slow")] == ["long"]
    assert worker.log.count("its time limit is 0.2 s: this pool cannot end it") == 1


def overran(bench: Bench, id: str) -> bool:
    """Whether it ran over its limit and then finished."""
    history = bench.app.delayed.history(id)
    events = [step.event for step in history.steps] if history else []
    return events == ["received", "started", "overran", "succeeded"]


@pytest.mark.smoke
def test_a_timeout_is_the_worker_s_time_limit(bench: Bench) -> None:
    with bench.worker(module="tests.kit.policies_app", pool="prefork", queues=["timed"]):
        bench.wait_for_answers()
        # A worker's report on its broker includes policies.
        (stats,) = (bench.app.control.inspect(timeout=5).stats() or {}).values()
        options = stats["broker"]["transport_options"]
        assert options["delayed_policies"]["timed"] == [{"Timeout": {"after": "4s"}}]
        bench.send("endless", 0, "tests.kit.policies_app.endless", queue="timed")
        result = bench.result("endless")
        wait_until(lambda: result.state == "FAILURE", "it is stopped")
        assert "TimeLimitExceeded" in repr(result.result)
