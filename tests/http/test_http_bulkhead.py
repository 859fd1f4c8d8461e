"""A hanging receiver takes only its share of the slots, and no attempt of a job is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery.exceptions import Reject

from celery_ext.http.callbacks import jobs as callbacks
from celery_ext.http.callbacks.bulkhead import Busy, host_limit, pause_seconds
from celery_ext.http.callbacks.job_options import JobOptions
from kombu_delayed.store.keys import http_host, http_host_timeouts, http_host_worker
from tests.kit.jobs import Jobs, run_jobs
from tests.kit.servers import Server
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough

ALLOWED = ["127.0.0.1:*", "localhost:*"]


class Hanging:
    """A handler that does not answer before its gate is opened; counts waiting requests."""

    def __init__(self) -> None:
        self.gate, self._lock = threading.Event(), threading.Lock()
        self.at_once = self.most = 0

    def __call__(self, handler: Any) -> None:
        with self._lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        self.gate.wait(120)
        with self._lock:
            self.at_once -= 1
        handler.wfile.write(b"HTTP/1.1 204 No Content\r\n\r\n")


@contextmanager
def hanging(jobs: Jobs, path: str = "/hangs") -> Iterator[Hanging]:
    found = jobs.receiver.answers[path] = Hanging()
    try:
        yield found
    finally:
        found.gate.set()


def attempts(jobs: Jobs, path: str) -> list[tuple[str, str]]:
    """The ids and attempts of the callbacks at a path."""
    got = [headers for where, headers, _ in jobs.receiver.got if where == path]
    return sorted((each["webhook-id"], each["Delayed-Attempt"]) for each in got)


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_host_that_hangs_leaves_slots_to_others(
    server: Server, tmp_path: Path, pool: str
) -> None:
    more = {"callback_allow": ALLOWED, "callback_per_host": 20, "callback_seconds": 120}
    with run_jobs(server, tmp_path, pool, **more) as jobs, hanging(jobs) as receiver:
        stuck = [jobs.send("/hangs", retry=0) for _ in range(12)]
        wait_until(lambda: receiver.at_once == 2, "half of four slots are taken")
        wait_until(lambda: len([*jobs.delayed.find()]) == 10, "the others are put off")
        other = f"http://localhost:{jobs.receiver.port}/healthy"
        ids = [jobs.send("/healthy", callback=other, retry=0) for _ in range(12)]
        for id in ids:
            jobs.wait(id, "done")
        assert (receiver.at_once, receiver.most) == (2, 2)
        receiver.gate.set()
        for id in stuck:
            jobs.wait(id, "done")
        assert receiver.most == 2
        assert attempts(jobs, "/hangs") == [(id, "1") for id in sorted(stuck)]
        assert attempts(jobs, "/healthy") == [(id, "1") for id in sorted(ids)]


def ends(jobs: Jobs, id: str) -> bool:
    """Whether a job is done; one that was postponed by half a minute is run now."""
    jobs.delayed.run_now(id)
    return bool(jobs.state(id).get("status") == "done")


def test_a_host_that_times_out_gets_one_callback_at_a_time(
    server: Server, client: redis.Redis, tmp_path: Path
) -> None:
    timeouts, places = http_host_timeouts("127.0.0.1"), http_host("127.0.0.1")
    with run_jobs(server, tmp_path) as jobs, hanging(jobs) as receiver:
        for count in (1, 2, 3):
            jobs.wait(jobs.send("/hangs", retry=0, timeout=1), "dead")
            assert client.get(timeouts) == b"%d" % count
        wait_until(lambda: client.zcard(places) == 0, "their places are free")
        before = receiver.at_once
        ids = [jobs.send("/hangs", retry=0, timeout=60) for _ in range(4)]
        wait_until(lambda: len([*jobs.delayed.find()]) == 3, "all but one are put off")
        assert receiver.at_once == before + 1
        receiver.gate.set()
        for id in ids:
            wait_until(lambda id=id: ends(jobs, id), f"{id} is done")
        assert client.get(timeouts) is None
        assert {attempt for _, attempt in attempts(jobs, "/hangs")} == {"1"}
        assert client.zcard(http_host_worker("127.0.0.1", "w1@test")) == 0


def test_a_job_that_was_put_off_is_tried_as_often_as_any(jobs_of_one: Jobs) -> None:
    with hanging(jobs_of_one) as receiver:
        first = jobs_of_one.send("/hangs", timeout=60)
        wait_until(lambda: receiver.at_once == 1, "the only place is taken")
        jobs_of_one.receiver.answers["/bad"] = (500, b"", {})
        id = jobs_of_one.send("/bad", retry=1, tenant="ada", priority=3)
        found = jobs_of_one.wait(id, "scheduled", retries=0)
        assert (found["retries"], found["tenant"], found["priority"]) == (0, "ada", 3)
        assert attempts(jobs_of_one, "/bad") == []
        receiver.gate.set()
        jobs_of_one.wait(first, "done")
        jobs_of_one.wait(id, "scheduled", 1)
        jobs_of_one.delayed.run_now(id)
        jobs_of_one.wait(id, "dead")
        assert attempts(jobs_of_one, "/bad") == [(id, "1"), (id, "2")]


@pytest.fixture
def jobs_of_one(server: Server, tmp_path: Path) -> Iterator[Jobs]:
    with run_jobs(server, tmp_path, callback_share=0.01) as found:
        yield found


def test_a_retry_that_cannot_be_sent_gives_the_job_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "GIVE_BACK_SECONDS", 0)

    def retry(**given: Any) -> None:
        raise Reject("the broker is gone", requeue=False)

    task: Any = SimpleNamespace(
        request=SimpleNamespace(id="a", retries=0, headers=None), retry=retry
    )
    with pytest.raises(Reject) as given_back:
        callbacks._again(task, JobOptions(), 3, OSError("status 500"))
    assert given_back.value.requeue


@pytest.mark.parametrize(
    ("slots", "share", "expected"),
    [(20, 0.25, 5), (4, 0.25, 1), (1, 0.25, 1), (3, 0.5, 1), (20, 1, 20)],
)
def test_share_of_the_slots(slots: int, share: float, expected: int) -> None:
    assert host_limit(SimpleNamespace(slots=slots), share) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("busy", "longest"),
    [(Busy(False, 0.3), 3), (Busy(False, 4), 6), (Busy(False, 60), 15), (Busy(True, 0.3), 45)],
)
def test_pauses_follow_how_long_the_host_has_not_answered(busy: Busy, longest: float) -> None:
    assert longest / 3 <= pause_seconds(busy) <= longest
