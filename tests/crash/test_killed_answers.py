"""Questions, answers and timeouts at once, while workers are killed."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_ext import expect, fail, respond
from tests.kit.extended import Bench, extended
from tests.kit.servers import Server
from tests.kit.wait import wait_until

pytestmark = pytest.mark.crash

QUESTIONS, KILLS = 200, 2

#: Of the questions: some while there are answers and kills, some after that.
TIMEOUT_SECONDS = (0.5, 4.0)

ENDS = ("response", "failure", "timeout")


class Questions:
    """Asks and answers in a random order. Each key is that of a tenant of its own."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench, self.app = bench, bench.app
        self.rng = random.Random(seed)
        self.keys = [f"k{n}" for n in range(QUESTIONS)]
        #: By key: the ends that answers were to bring that were not told to be late.
        self.taken: dict[str, list[str]] = defaultdict(list)
        answers = [(self.answer, key) for key in self.keys for _ in range(self.rng.randrange(3))]
        self.steps = [*((self.ask, key) for key in self.keys), *answers]
        self.rng.shuffle(self.steps)

    def take_part(self, n: int) -> None:
        size = len(self.steps) // (KILLS + 1) + 1
        for step, key in self.steps[n * size : (n + 1) * size]:
            step(key)

    def ask(self, key: str) -> None:
        follows: Any = {f"on_{end}": self.app.signature("note", [end]) for end in ENDS}
        timeout = self.rng.uniform(*TIMEOUT_SECONDS)
        expect(key, app=self.app, timeout=timeout, tenant=key, **follows)

    def answer(self, key: str) -> None:
        if self.rng.random() < 0.7:
            said, end = respond(self.app, key, 1, tenant=key), "response"
        else:
            said, end = fail(self.app, key, "no", tenant=key), "failure"
        if said != "late":
            self.taken[key].append(end)

    def ends(self) -> dict[str, set[str]]:
        """By key: what has followed."""
        found = defaultdict(set)
        for entry in self.bench.ledger.entries():
            found[entry["tenant"]].add(entry["args"][-1])
        return found

    def is_over(self) -> bool:
        left = self.app.delayed.counts("celery")["celery"]
        return len(self.ends()) == QUESTIONS and not (left.delayed or left.ready or left.unacked)


@pytest.fixture
def bench(server: Server, tmp_path: Path) -> Iterator[Bench]:
    with extended(server, tmp_path, task_ignore_result=True) as bench:
        bench.settings.transport_options["delayed_lease_seconds"] = 1
        yield bench


def test_each_question_has_one_end(bench: Bench) -> None:
    questions = Questions(bench, seed=7)
    options: Any = {"module": "tests.kit.asking_app", "pool": "threads", "gossip": False}
    workers = [bench.worker(name, concurrency=4, **options) for name in ("w1", "w2")]
    try:
        for worker in workers:
            worker.start()
        for n in range(KILLS):
            questions.take_part(n)
            workers[n % 2].kill()
            workers[n % 2].start(wait=False)
        questions.take_part(KILLS)
        wait_until(questions.is_over, "each question has an end, and nothing is left", 60)
    finally:
        for worker in workers:
            worker.kill()
    found = questions.ends()
    assert {*itertools.chain(*found.values())} == {*ENDS}, "each of them wins some time"
    for key in questions.keys:
        assert len(questions.taken[key]) <= 1
        assert found[key] == ({*questions.taken[key]} or {"timeout"}), key
    assert [*bench.app.delayed.dead.list()] == []
