"""Real workers of a paused queue return tasks they have not begun, and claim nothing."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import redis
from kombu import Connection, Consumer

from celery_ext import install
from celery_ext.errors import QueryError, StillRunning
from kombu_delayed.consumer import part
from kombu_delayed.inspection.doctor import examine_queues
from kombu_delayed.store.store import Store
from tests.kit.cli import run
from tests.kit.clusters import Cluster
from tests.kit.extended import Bench, extended
from tests.kit.servers import Server
from tests.kit.tasks_app import make_app
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough

NAMES = [str(n) for n in range(8)]


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_workers_leave_it_alone(pool: str, bench: Bench, tmp_path: Path) -> None:
    pauses_and_resumes(bench, pool, tmp_path)


def test_shards_on_a_cluster(cluster: Cluster, bench: Bench, tmp_path: Path) -> None:
    options = {"delayed_shards": {"celery": 3}}
    url = f"delayed+{cluster.url}"
    settings = replace(bench.settings, broker_url=url, transport_options=options)
    with make_app(settings) as app:
        delayed = install(app)
        try:
            pauses_and_resumes(replace(bench, app=app, settings=settings), "prefork", tmp_path)
        finally:
            delayed.close()


def pauses_and_resumes(bench: Bench, pool: str, directory: Path) -> None:
    """Running tasks continue while their queue is paused; waiting tasks run once, later."""
    app, delayed, go = bench.app, bench.app.delayed, directory / "go"
    with bench.worker(pool=pool, concurrency=1, queues=("celery", "other")):
        bench.wait_for_answers()
        app.send_task("until", [str(go)], task_id="first")
        bench.ledger.wait_for(1)
        for name in NAMES:
            app.send_task("record", task_id=name, countdown=0.1 if int(name) % 2 else None)
        wait_until(lambda: held(bench) > 0, "the worker has some that it cannot begin")
        pause = delayed.pause("celery", why="a migration", by="ann")
        assert [asdict(each) for each in delayed.pauses()] == [asdict(pause)]
        wait_until(lambda: held(bench) == 0, "all that has not begun is back", 30)
        wait_until(lambda: last_steps(bench) == {"returned"}, "all are known to be back", 30)
        go.touch()
        app.send_task("record", task_id="fence", queue="other")
        assert [each["id"] for each in bench.ledger.wait_for(2)] == ["first", "fence"]
        found = delayed.metrics("celery")["celery"]
        assert (found.paused, found.oldest_due_seconds) == (True, 0)
        assert delayed.resume("celery")
        bench.ledger.wait_for(2 + len(NAMES))
        assert bench.ledger.runs() == dict.fromkeys(["first", "fence", *NAMES], 1)
    assert delayed.pauses() == []


@pytest.mark.parametrize("config", [{}, {"task_acks_late": True, "delayed_outcomes": False}])
def test_a_queue_is_drained(config: dict[str, bool], server: Server, tmp_path: Path) -> None:
    """Once its running task has ended, whether that was acknowledged before or not."""
    go = tmp_path / "go"
    with extended(server, tmp_path, **config) as bench:
        app, delayed = bench.app, bench.app.delayed
        with bench.worker(pool="prefork"):
            bench.wait_for_answers()
            app.send_task("until", [str(go)], task_id="first")
            bench.ledger.wait_for(1)
            if not config:
                wait_until(lambda: [*delayed.recorded("running", "celery")], "it is recorded")
            with pytest.raises(StillRunning, match="is paused, but its workers still have 1 task"):
                delayed.pause("celery", drain=0.1)
            told = run(app, "pause", "celery", "--drain", "100ms")
            assert (told.exit_code, "still have 1 task" in told.stderr) == (1, True)
            app.send_task("record", task_id="waits")
            go.touch()
            assert delayed.pause("celery", drain="2m").queue == "celery"
            assert app.AsyncResult("first").state == "SUCCESS"
            assert delayed.resume("celery")
            bench.ledger.wait_for(2)


def test_only_a_whole_queue_is_drained(bench: Bench) -> None:
    with pytest.raises(QueryError, match="drain=… waits for a whole queue: omit task=… and"):
        bench.app.delayed.pause("celery", tenant="ada", drain="1m")
    with pytest.raises(QueryError, match="drain='soon' is not a length of time"):
        bench.app.delayed.pause("celery", drain="soon")
    assert bench.app.delayed.pauses() == []
    assert bench.app.delayed.pause("celery", drain="1m").queue == "celery"


def last_steps(bench: Bench) -> set[str]:
    """Return the last recorded events of the tasks that a worker has received."""
    histories = [bench.app.delayed.history(name) for name in NAMES]
    return {each.last.event for each in histories if each is not None and each.last is not None}


def held(bench: Bench) -> int:
    return bench.app.delayed.counts("celery")["celery"].unacked


def test_who_runs_tasks_in_its_loop_finds_out(
    connection: Connection, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets no news while it is at work, and has claimed some tasks already."""
    monkeypatch.setattr(part, "PAUSE_SECONDS", 0)
    got: list[str] = []

    def on_message(message: object) -> None:
        body = message.payload  # type: ignore[attr-defined]
        got.append(body)
        message.ack()  # type: ignore[attr-defined]
        if body == "first":
            store.pauses.pause("mail", "ann", "")
            producer.publish("fence", routing_key="other")

    queues = [connection.SimpleQueue(name) for name in ("mail", "other")]
    producer = connection.Producer()
    for body in ("first", "second", "third"):
        producer.publish(body, routing_key="mail")
    with connection.channel() as channel:
        channel.basic_qos(0, 10, False)
        with Consumer(channel, [each.queue for each in queues], on_message=on_message):
            while "fence" not in got:
                connection.drain_events(timeout=10)
            assert got == ["first", "fence"]
            wait_until(lambda: store.size("mail").ready == 2, "they are back")
            store.pauses.resume("mail")
            while len(got) < 4:
                connection.drain_events(timeout=10)
    assert got == ["first", "fence", "second", "third"]


def test_late_is_what_comes_late_after_the_pause(bench: Bench) -> None:
    """The duration of a pause counts neither for the signal nor for the metrics."""
    bench.app.send_task("record", task_id="a", countdown=3600)
    bench.app.delayed.pause("celery")
    assert bench.app.delayed.run_now("a")
    before_ms = time.time() * 1000
    bench.app.delayed.resume("celery")
    with bench.app.connection_for_read() as connection:
        message = connection.default_channel.basic_get("celery", no_ack=False)
        headers = message.headers
        message.ack()
    assert headers.due_ms <= before_ms + 1000
    assert headers.resumed_ms >= int(before_ms) - 1000


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"queue": "celer"}, "there is no queue 'celer': did you mean 'celery'?"),
        ({"queue": "celery", "for_": "soon"}, "for_="),
        ({"queue": "celery", "for_": 0}, "for_=0 is not a length"),
    ],
)
def test_wrong_pauses(given: dict[str, object], said: str, bench: Bench) -> None:
    with pytest.raises(QueryError, match=said.replace("?", r"\?")):
        bench.app.delayed.pause(**given)  # type: ignore[arg-type]
    assert bench.app.delayed.pauses() == []


def test_the_doctor_tells_of_it(store: Store, client: redis.Redis) -> None:
    store.publish("q", [])
    client.lpush("q", "{}")
    store.pauses.pause("q", "ann", "a migration")
    (found,) = examine_queues(store, ["q"], fix=True, patience_seconds=0)
    assert (found.kind, found.examples, found.is_wrong) == (
        "paused",
        ["by ann: a migration"],
        False,
    )
    assert not client.zrange("{q}:wake", 0, -1)
