"""Tasks that ask an outside system: expect, respond, fail, and what follows in workers."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, chord
from celery.bin.base import CLIContext
from celery.canvas import Signature
from click.testing import CliRunner, Result
from kombu.exceptions import OperationalError

from celery_ext import Query, expect, fail, respond
from celery_ext.app import signals
from celery_ext.cli import delayed as cli
from celery_ext.control.answers import waiting_task
from celery_ext.control.answers.waiting_task import TASK
from celery_ext.errors import (
    AlreadyExpected,
    AnswerFailed,
    AnswersFull,
    AnswerTimeout,
    ExpectationError,
    QueryError,
)
from celery_ext.http.callbacks.jobs import JOB_TASK
from celery_ext.policies import Timeout
from celery_ext.policies.of_message import write
from kombu_delayed.consumer.policy.of_message import HEADER
from kombu_delayed.errors import OptionError
from tests.kit.clusters import Cluster
from tests.kit.extended import Bench
from tests.kit.heard import heard
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:Call to deprecated setex")]

LONG_SECONDS = 30


@pytest.fixture
def app(bench: Bench) -> Celery:
    return bench.app


def asking(bench: Bench, pool: str = "solo", **options: Any) -> Any:
    given = {"module": "tests.kit.asking_app", "gossip": False, "pool": pool, **options}
    return bench.worker(**given)


def ask(bench: Bench, key: str, *more: Any, name: str = "ask", **options: Any) -> str:
    """Make a worker ask; returns the id of the expectation."""
    found: str = bench.app.send_task(name, [key, *more], **options).get(timeout=LONG_SECONDS)
    return found


def noted(bench: Bench, count: int) -> list[list[Any]]:
    """Wait until `count` tasks have followed; return their arguments."""
    wait_until(lambda: len(bench.ledger.entries()) >= count, f"{count} follow", LONG_SECONDS)
    return sorted((each["args"] for each in bench.ledger.entries()), key=str)


def state(app: Celery, key: str, tenant: str | None = None) -> str | None:
    info = app.delayed.expectations.get(key, tenant)
    return info.state if info else None


def test_ends_of_questions(bench: Bench) -> None:
    app = bench.app
    with asking(bench, "prefork", concurrency=2):
        id = ask(bench, "k", headers={"tenant": "ada"})
        result = app.AsyncResult(id)
        assert result.state == "EXPECTING"
        assert (result.info["key"], result.info["tenant"]) == ("k", "ada")
        assert respond(app, "k", "not hers") == "early"
        assert respond(app, "k", {"paid": True}, tenant="ada") == "accepted"
        assert respond(app, "k", {"paid": False}, tenant="ada") == "late"
        assert result.get(timeout=LONG_SECONDS) == {"paid": True}
        (follower,) = result.children
        assert follower.get(timeout=LONG_SECONDS) == [{"paid": True}, "response"]
        assert [each["tenant"] for each in bench.ledger.entries()] == ["ada"]

        failed = app.AsyncResult(ask(bench, "f"))
        assert fail(app, "f", ValueError("no money")) == "accepted"
        with pytest.raises(AnswerFailed, match="ValueError: no money"):
            failed.get(timeout=LONG_SECONDS)

        late = app.AsyncResult(ask(bench, "t", 0.05))
        with pytest.raises(AnswerTimeout, match="'t'"):
            late.get(timeout=LONG_SECONDS)
        assert respond(app, "t", 1) == "late"

        assert respond(app, "e", 7) == "early"
        assert app.AsyncResult(ask(bench, "e")).get(timeout=LONG_SECONDS) == 7
        assert noted(bench, 4) == [
            ["ValueError: no money", "failure"],
            ["t", "timeout"],
            [7, "response"],
            [{"paid": True}, "response"],
        ]
    assert [state(app, key) for key in ("f", "t", "e", "k")] == [
        "failed",
        "timed_out",
        "answered",
        "early",
    ]


def test_an_answer_after_the_timeout_that_a_worker_gave_back(bench: Bench) -> None:
    app, queue = bench.app, bench.app.conf.task_default_queue
    expectation = expect("k", timeout=0.001, app=app)
    claim = partial(app.delayed.store.deliver, queue, "ends:1:x", 1, 1, lease_ms=60_000)
    wait_until(lambda: (got := claim()) and got.records, "a worker has it")
    assert respond(app, "k", 5) == "accepted"
    assert state(app, "k") == "answered"
    app.delayed.store.leases.leave(queue, "ends:1:x")
    with asking(bench):
        assert expectation.result.get(timeout=LONG_SECONDS) == 5
    assert respond(app, "k", 6) == "late"


def test_canvases_and_results(bench: Bench) -> None:
    app = bench.app
    with asking(bench):
        ids = [ask(bench, shape, 3600, shape) for shape in ("chain", "group")]
        assert [respond(app, shape, 5) for shape in ("chain", "group")] == ["accepted"] * 2
        assert [app.AsyncResult(id).get(timeout=LONG_SECONDS) for id in ids] == [5, 5]
        assert noted(bench, 4) == [[5, "first"], [5, "one"], [5, "two"], [[5, "first"], "second"]]

        whole = (
            app.signature("ask_for_result", ["r"]) | app.signature("note", ["then"])
        ).apply_async()
        wait_until(lambda: state(app, "r") == "open", "it asks", LONG_SECONDS)
        assert whole.parent.state == "EXPECTING"
        assert respond(app, "r", "yes") == "accepted"
        assert whole.get(timeout=LONG_SECONDS) == ["yes", "then"]
        assert whole.parent.get(timeout=LONG_SECONDS) == "yes"

        header = [app.signature("ask_for_result", ["c"]), app.signature("note", ["x"])]
        of_chord = chord(header, app=app)(app.signature("note", ["body"]))
        wait_until(lambda: state(app, "c") == "open", "it asks", LONG_SECONDS)
        respond(app, "c", 1)
        assert of_chord.get(timeout=LONG_SECONDS) == [[1, ["x"]], "body"]

        alone = app.send_task("ask_for_result", ["s", 0.05])
        with pytest.raises(AnswerTimeout):
            alone.get(timeout=LONG_SECONDS)


def test_what_cannot_be_sent_is_a_dead_letter(bench: Bench) -> None:
    app = bench.app
    with asking(bench):
        ask(bench, "k", 3600, "unsendable")
        respond(app, "k", 1)
        wait_until(lambda: [*app.delayed.dead.list()], "it is buried", LONG_SECONDS)
    (letter,) = app.delayed.dead.list()
    assert letter.info.task == TASK
    assert "the follow-up cannot be sent" in letter.letter.reason
    assert respond(app, "k", 2) == "late"


def test_a_copy_sends_nothing(app: Celery, client: redis.Redis) -> None:
    follows = app.signature("record")
    id = expect("k", app=app, on_response=follows, on_timeout=follows).id
    respond(app, "k", 1)
    before = client.lrange("celery", 0, -1)
    copy = app.tasks[TASK].apply(kwargs={"key": "k", "on_timeout": follows}, task_id=id)
    assert copy.state == "IGNORED"
    assert client.lrange("celery", 0, -1) == before


def test_what_cannot_be_sent_now_comes_again(
    app: Celery, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_broker(*args: Any, **options: Any) -> Any:
        raise OperationalError("no broker")

    follows = app.signature("record")
    id = expect("k", app=app, on_timeout=follows).id
    monkeypatch.setattr(waiting_task, "PAUSE_SECONDS", 0)
    with monkeypatch.context() as patched:
        patched.setattr(Signature, "apply_async", no_broker)
        done = app.tasks[TASK].apply(kwargs={"key": "k", "on_timeout": follows}, task_id=id)
    assert done.state == "REJECTED"
    assert "reject requeue=True" in caplog.text
    assert state(app, "k") == "timed_out", "it is settled, and nothing else follows"


@pytest.mark.parametrize("answer", ["{", "{}", '{"payload": {"__type__": "x", "__value__": 1}}'])
def test_an_answer_that_cannot_be_read_here_is_a_dead_letter(app: Celery, answer: str) -> None:
    id = expect("k", app=app).id
    headers = {"delayed_answer": answer}
    done = app.tasks[TASK].apply(kwargs={"key": "k"}, task_id=id, headers=headers)
    assert done.state == "REJECTED"
    assert state(app, "k") == "open", "it is not settled"


def test_workers_with_wrong_options_lose_nothing(app: Celery) -> None:
    id = expect("k", app=app).id
    app.conf.delayed_expectations = {"queu": "answers"}
    assert app.tasks[TASK].apply(kwargs={"key": "k"}, task_id=id).state == "REJECTED"


def test_outside_of_tasks(app: Celery) -> None:
    expectation = expect("k", app=app, timeout=timedelta(hours=2))
    assert (expectation.key, expectation.tenant, expectation.state) == ("k", None, "open")
    assert expectation.result.state == "EXPECTING"
    info = app.delayed.get(expectation.id)
    assert info.task == TASK
    assert timedelta(minutes=119) < info.remaining <= timedelta(hours=2)
    with pytest.raises(AlreadyExpected, match=f"{expectation.id} is open for the key 'k'"):
        expect("k", app=app)
    assert expect("k", app=app, tenant="ada").state == "open"
    keys = {(each.key, each.tenant, each.state) for each in app.delayed.expectations.list()}
    assert keys == {("k", None, "open"), ("k", "ada", "open")}
    assert [each.tenant for each in app.delayed.expectations.list("ada")] == ["ada"]


def test_cancelling(app: Celery) -> None:
    expectation = expect("k", app=app)
    assert app.delayed.expectations.cancel("k")
    assert not app.delayed.expectations.cancel("k")
    assert expectation.result.state == "REVOKED"
    assert (state(app, "k"), respond(app, "k")) == ("cancelled", "late")
    other = expect("l", app=app)
    assert app.delayed.cancel(other.id)
    assert (state(app, "l"), respond(app, "l")) == ("cancelled", "late")
    assert expect("l", app=app).state == "open", "another question"


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"key": ""}, ExpectationError, "a key is text of 1 to 1,000 characters, not ''"),
        ({"timeout": "soon"}, QueryError, "timeout='soon' is not a length of time"),
        ({"timeout": 0}, QueryError, "timeout=0 is not"),
        ({"on_response": "note"}, ExpectationError, "on_response takes a signature"),
        ({"as_result": True}, ExpectationError, "needs a task that a worker runs"),
        ({"app": None}, ExpectationError, "outside of a task, expect needs app="),
    ],
)
def test_what_cannot_be_expected(app: Celery, given: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        expect(**{"key": "k", "app": app, **given})
    assert [*app.delayed.expectations.list()] == []


def test_an_app_that_has_not_asked_expects_nothing(bench: Bench) -> None:
    """Its workers keep messages of others as dead letters, and say which option to set."""
    bench.app.conf.delayed_expectations = None
    with pytest.raises(ExpectationError, match=r"set `delayed_expectations = {}`"):
        expect("k", app=bench.app)
    bench.settings.config["delayed_expectations"] = None
    names = TASK, JOB_TASK
    with bench.worker(gossip=False) as worker:
        ids = {bench.app.send_task(name, ["k"]).id for name in names}
        dead = lambda: {each.info.id for each in bench.app.delayed.dead.list()} == ids  # noqa: E731
        wait_until(dead, "both are dead letters", LONG_SECONDS)
        assert not any(f". {name}" in worker.log for name in names)
        for setting in ("`delayed_expectations = {}`", '`delayed_http = {"callbacks": True}`'):
            assert setting in worker.log


def test_what_is_no_answer(app: Celery) -> None:
    with pytest.raises(ExpectationError, match="cannot be kept as JSON"):
        respond(app, "k", object())
    app.conf.delayed_expectations = {"answer_bytes": 100, "early_limit": 1}
    with pytest.raises(ExpectationError, match="at most 100"):
        respond(app, "k", "x" * 100)
    assert respond(app, "k") == "early"
    with pytest.raises(AnswersFull, match="1 early answers are kept"):
        respond(app, "l")


def test_options(app: Celery) -> None:
    app.conf.delayed_expectations = {"queue": "answers", "timeout_seconds": 60, "early_seconds": 0}
    assert respond(app, "k") == "unknown"
    info = app.delayed.get(expect("k", app=app).id)
    assert info.queue == "answers"
    assert info.remaining <= timedelta(seconds=60)
    for wrong in ({"queu": "x"}, {"timeout_seconds": 0}, {"early_limit": 1.5}, "answers"):
        app.conf.delayed_expectations = wrong
        with pytest.raises(OptionError, match="delayed_expectations"):
            expect("l", app=app)


def test_timeouts_of_policies(app: Celery) -> None:
    @app.task(policies=[Timeout("10m")], name="patient", shared=False)
    def patient(key: str, timeout: Any = None) -> str:
        return expect(key, timeout=timeout).id

    for key, given, seconds in (("a", None, 600), ("b", 60, 60)):
        id = patient.apply((key, given), throw=True).get()
        assert seconds - 30 < app.delayed.get(id).remaining.total_seconds() <= seconds
    headers = {HEADER: write([Timeout("5m")])}
    id = patient.apply(("c",), headers=headers, throw=True).get()
    assert 270 < app.delayed.get(id).remaining.total_seconds() <= 300


def test_eager_apps_expect_nothing_and_others_need_no_results(app: Celery) -> None:
    app.conf.task_ignore_result = True
    assert expect("k", app=app).result.state == "PENDING"
    app.conf.task_always_eager = True
    with pytest.raises(ExpectationError, match="task_always_eager"):
        expect("l", app=app)


def test_signals(app: Celery) -> None:
    with heard(signals.answer_expected) as expected, heard(signals.answer_given) as given:
        id = expect("k", app=app, tenant="ada").id
        respond(app, "k", tenant="ada")
        respond(app, "l")
    names = ("sender", "key", "tenant", "id")
    assert [(*map(each.get, names), each["state"]) for each in expected] == [
        (app, "k", "ada", id, "open")
    ]
    assert [(*map(each.get, names), each["outcome"]) for each in given] == [
        (app, "k", "ada", id, "accepted"),
        (app, "l", None, None, "early"),
    ]


def run_cli(app: Celery, *words: str) -> Result:
    context = CLIContext(app=app, no_color=True, workdir=None)
    return CliRunner().invoke(cli, ["expectations", *words], obj=context)


def test_command_line(app: Celery) -> None:
    assert run_cli(app, "list").exit_code == 1
    expect("k", app=app, tenant="ada")
    expect("l", app=app)
    shown = run_cli(app, "list").output
    assert ("ada" in shown, shown.count("open")) == (True, 2)
    assert run_cli(app, "show", "k").exit_code == 1
    assert "open" in run_cli(app, "show", "k", "--tenant", "ada").output
    answered = run_cli(app, "respond", "k", '{"paid": true}', "--tenant", "ada", "--json")
    assert '"outcome": "accepted"' in answered.output
    assert run_cli(app, "respond", "k", "{").exit_code == 2
    assert [run_cli(app, "cancel", "l").exit_code for _ in range(2)] == [0, 1]
    assert "early" in run_cli(app, "fail", "m", "no money").output


def test_cluster(cluster: Cluster) -> None:
    with make_app(Settings(f"delayed+{cluster.url}")) as app:
        for n, queue in enumerate(cluster.queues_apart()):
            app.conf.delayed_expectations = {"queue": queue}
            assert respond(app, f"early{n}", 1) == "early"
            assert expect(f"early{n}", app=app).state == "answered"
            assert expect(f"k{n}", app=app, on_response=Signature("x", app=app)).state == "open"
            assert respond(app, f"k{n}", 1) == "accepted"
            assert respond(app, f"k{n}", 1) == "late"


def test_restored_expectations_are_in_the_first_shard(
    app: Celery, client: redis.Redis, tmp_path: Path
) -> None:
    app.conf.broker_transport_options["delayed_shards"] = {"celery": 6}
    keys = [f"key-{n}" for n in range(6)]
    for key in keys:
        expect(key, timeout="2h", app=app)
    app.delayed.backup(tmp_path / "backup")  # type: ignore[attr-defined]
    client.flushdb()
    assert app.delayed.restore(tmp_path / "backup").messages == 6  # type: ignore[attr-defined]
    assert [respond(app, key, 1) for key in keys] == ["accepted"] * 6


def test_an_expectation_stays_in_its_queue(app: Celery, bench: Bench) -> None:
    delayed: Any = app.delayed  # type: ignore[attr-defined]
    bench.send("there", queue="other")
    bench.send("moves", LONG_SECONDS * 100)
    id = expect("payment", timeout="2h", app=app).id
    assert delayed.redirect_many(Query(queue="celery"), "other", dry_run=True).matched == 1
    assert delayed.redirect_many(Query(queue="celery"), "other").changed == 1
    with pytest.raises(QueryError, match="no answer finds it in another queue"):
        delayed.redirect(id, "other")
    assert respond(app, "payment", 1) == "accepted"
