"""Limits set at run time, with a real worker: it runs more tasks within moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_ext.errors import QueryError
from celery_ext.policies import Limit
from tests.kit.extended import Bench
from tests.kit.limits_app import make_limited_app
from tests.kit.policed import OpenApp
from tests.kit.wait import wait_until


def test_a_worker_obeys(bench: Bench, tmp_path: Path) -> None:
    app, go = make_limited_app(bench.settings), tmp_path / "go"
    delayed = app.delayed  # type: ignore[attr-defined]
    with bench.worker(module="tests.kit.limits_app", pool="threads", concurrency=4):
        for n in range(5):
            app.send_task("until", [str(go)], task_id=str(n))
        bench.ledger.wait_for(1)
        wait_until(lambda: delayed.limits("celery")[0].waiting == 4, "the others wait")
        found = delayed.set_limit("celery", concurrency=3, why="the provider allows it", by="ann")
        assert (found.capacity, found.declared_capacity, found.overridden) == (3, 1, True)
        bench.ledger.wait_for(3)
        (now,) = delayed.limits("celery")
        assert (now.in_use, now.waiting, now.set_by) == (3, 2, "ann")
        go.touch()
        bench.ledger.wait_for(5)
        assert delayed.reset_limit("celery")
        (now,) = delayed.limits("celery")
        assert (now.capacity, now.overridden) == (1, False)
    delayed.close()


def test_a_lower_limit_is_for_what_a_worker_has_claimed(bench: Bench, tmp_path: Path) -> None:
    app, go = make_limited_app(bench.settings), tmp_path / "go"
    delayed = app.delayed  # type: ignore[attr-defined]
    delayed.set_limit("celery", concurrency=5)
    more = ("--prefetch-multiplier", "5")
    with bench.worker(module="tests.kit.limits_app", pool="threads", options=more):
        bench.wait_for_answers()
        for n in range(6):
            app.send_task("until", [str(go)], task_id=str(n))
        wait_until(lambda: in_use(delayed) == 5, "the worker runs one, and has claimed four more")
        bench.ledger.wait_for(1)
        delayed.set_limit("celery", concurrency=2)
        wait_until(lambda: in_use(delayed) == 2, "it has returned those that it may not start", 30)
        assert delayed.reset_limit("celery")
        wait_until(lambda: in_use(delayed) == 1, "it keeps the one that runs", 30)
        go.touch()
        bench.ledger.wait_for(6)
        assert bench.ledger.runs() == {str(n): 1 for n in range(6)}
    delayed.close()


def in_use(delayed: Any) -> int:
    (found,) = delayed.limits("celery")
    return int(found.in_use)


@pytest.fixture
def app(open_app: OpenApp) -> Celery:
    return open_app(Limit(concurrency=5), Limit(rate="100/m", by="host"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "queue"}, "takes at least one of concurrency="),
        ({"concurrency": 2}, "name one of its limits: .* 'host', 'queue'|'queue', 'host'"),
        ({"name": "hots", "rate": "1/s"}, "there is no limit 'hots'"),
        ({"name": "queue", "rate": "1/s"}, "'queue' has no rate"),
        ({"name": "host", "concurrency": 2}, "'host' has no concurrency"),
        ({"name": "queue", "concurrency": 0}, "whole number from 1"),
        ({"name": "host", "rate": "fast"}, "rate='fast' is not a rate"),
        ({"name": "host", "burst": 2, "for_": "x"}, "for_='x'"),
    ],
)
def test_what_cannot_be_set(given: dict[str, Any], said: str, app: Celery) -> None:
    with pytest.raises(QueryError, match=said):
        app.delayed.set_limit("celery", **given)
    assert not any(each.overridden for each in app.delayed.limits("celery"))


def test_a_queue_that_nothing_was_sent_to(open_app: OpenApp) -> None:
    app = open_app()
    options = app.conf.broker_transport_options
    policies = {"delayed_policies": {"unused": [Limit(concurrency=2)]}}
    app.conf.broker_transport_options = {**options, **policies}
    delayed = app.delayed  # type: ignore[attr-defined]
    delayed.policies.apply()
    assert [(each.queue, each.capacity) for each in delayed.limits()] == [("unused", 2)]
    assert [each.queue for each in delayed.policies()] == ["unused"]


def test_a_queue_without_limits(open_app: OpenApp) -> None:
    app = open_app()
    with pytest.raises(QueryError, match="queue 'celery' has no Limit"):
        app.delayed.set_limit("celery", concurrency=2)  # type: ignore[attr-defined]


def test_the_limit_of_a_task_in_each_queue_that_it_is_sent_to(open_app: OpenApp) -> None:
    app = open_app()
    delayed = app.delayed  # type: ignore[attr-defined]

    @app.task(name="lim", shared=False, policies=[Limit(concurrency=1)])
    def lim() -> None: ...

    for queue in ("celery", "other"):
        lim.apply_async(queue=queue)
    found = delayed.set_limit("other", "lim/queue", concurrency=3)
    assert (found.capacity, found.declared_capacity) == (3, 1)
    assert [each.capacity for each in delayed.limits("other")] == [3]
    assert [each.capacity for each in delayed.limits("celery")] == [1]
    assert delayed.reset_limit("other", "lim/queue")
    assert not any(each.overridden for each in delayed.limits("other"))


def test_what_is_shown(app: Celery) -> None:
    found = app.delayed.set_limit("celery", "host", rate="5/s", burst=9, for_="2h", by="ann")
    assert (found.rate, found.burst, found.declared_rate) == ("5/s", 9, "100/m")
    assert found.set_until is not None
    assert [each.overridden for each in app.delayed.limits("celery")] == [True, False]
