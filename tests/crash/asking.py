"""Tasks that ask, and the thread of the harness that answers them."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from typing import Any, NamedTuple

from celery import Celery
from kombu.exceptions import OperationalError

from celery_ext import expect, fail, respond
from kombu_delayed.errors import UNREACHABLE, NotReplicated
from tests.crash.journal import running, write

PAUSE_SECONDS, TURN_SECONDS = 0.1, 0.01

#: As defined by the extension; its previous version defines them elsewhere.
NOT_NOW = (OperationalError, NotReplicated, *UNREACHABLE)


def add_tasks(app: Celery) -> None:
    options = {"bind": True, "shared": False}
    app.task(name="ask_early", **options)(_ask)
    app.task(name="ask_late", acks_late=True, **options)(_ask)
    app.task(name="conclude", acks_late=True, **options)(_conclude)


def _ask(self: Any, timeout: float) -> None:
    """Asks under its own id, and ends."""
    question = self.request.id
    follow = {
        f"on_{what}": self.app.tasks["conclude"].s(what=what, question=question)
        for what in ("response", "failure", "timeout")
    }
    with running(self):
        expectation = None
        while expectation is None:
            try:
                expectation = expect(question, timeout=timeout, **follow)
            except NOT_NOW:
                time.sleep(PAUSE_SECONDS)
        write("asked", question, self.request.retries, state=expectation.state)


def _conclude(self: Any, content: Any, what: str, question: str) -> None:
    """Follows from an answer, or from the timeout."""
    facts = {"question": question, "what": what, "content": str(content)}
    with running(self, sent_by=self.request.parent_id, **facts):
        pass


class Answer(NamedTuple):
    """An answer, given `after_seconds` after the question was sent.

    `what` is "response" or "failure".
    """

    after_seconds: float
    what: str


def draw(rng: random.Random) -> tuple[float, float, tuple[Answer, ...]]:
    """A task's countdown, its timeout, and none, one or two answers at any time."""
    countdown = rng.choice([0.0, round(rng.uniform(0.2, 2), 2)])
    timeout = round(rng.uniform(0.5, 3), 2)
    answers = tuple(
        Answer(
            rng.uniform(0, countdown + 1.2 * timeout),
            rng.choice(["response", "response", "failure"]),
        )
        for _ in range(rng.choice([0, 1, 1, 1, 2]))
    )
    return countdown, timeout, answers


class Answerer(threading.Thread):
    """Gives answers at their times, and repeats each until it gets a reply."""

    def __init__(self, app: Celery) -> None:
        super().__init__(daemon=True)
        self._app = app
        self._order = itertools.count()
        self._due: list[tuple[float, int, str, str | None, Answer]] = []
        self._lock = threading.Lock()
        self._ends = False

    def give(self, question: str, tenant: str | None, answers: tuple[Answer, ...]) -> None:
        for answer in answers:
            at = time.monotonic() + answer.after_seconds
            with self._lock:
                heapq.heappush(self._due, (at, next(self._order), question, tenant, answer))

    def stop(self) -> None:
        """Ends the thread after it has given all answers."""
        self._ends = True

    def run(self) -> None:
        while self._due or not self._ends:
            if self._due and self._due[0][0] <= time.monotonic():
                with self._lock:
                    _, *given = heapq.heappop(self._due)
                self._give(*given)
            else:
                time.sleep(TURN_SECONDS)

    def _give(self, number: int, question: str, tenant: str | None, answer: Answer) -> None:
        facts = {"what": answer.what, "content": str(number)}
        options = {"tenant": tenant, "answer_id": f"answer {number}"}
        give = respond if answer.what == "response" else fail
        while True:
            write("answer", question, 0, **facts)
            try:
                said = give(self._app, question, str(number), **options)
            except (OperationalError, NotReplicated):
                time.sleep(PAUSE_SECONDS)
            except Exception as error:  # no answerer should get this
                write("unheard", question, 0, error=repr(error), **facts)
                return
            else:
                write("told", question, 0, said=said, **facts)
                return
