"""The steps of a task in the order in which they happened, however late workers wrote them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_ext.tasks.history import NESTING, TaskHistory
from kombu_delayed.store.outcomes.records import Known

#: The fields that Celery reports for a task that has called `replace`.
REPLACED = {"why": "ignored", "message": "Replaced by new task"}
CANCELLED = {"why": "cancelled"}

#: The first attempt of the task that replaces another.
OTHER = NESTING + 1


def history(*rows: list[Any]) -> TaskHistory:
    rows = (["t", "mail", None], *rows)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return TaskHistory.of(Known("q", "a", text.encode(), True))


def run(
    at: int, attempt: int, end: str = "", facts: Any = None, worker: str = "w:1:a"
) -> list[list[Any]]:
    """The lines of a run that is received at this time in seconds, and takes two."""
    ms = at * 1000
    rows = [["r", ms, attempt - 1, worker], ["s", ms + 1000, attempt - 1, worker, 7, 0]]
    return rows + ([[end, ms + 2000, attempt - 1, {} if facts is None else facts]] if end else [])


CASES = {
    "a retry whose worker's clock is behind": ([*run(100, 1, "~"), *run(98, 2, "+")], "succeeded"),
    "a first attempt that is written after the second one": (
        [*run(100, 2, "+"), *run(101, 1, "~")],
        "succeeded",
    ),
    "an end that is written late": (
        [*run(100, 1), *run(98, 2, "-"), ["~", 102_000, 0, {}]],
        "failed",
    ),
    "cancelled after its second attempt": (
        [*run(100, 1, "~"), *run(110, 2, "~"), ["x", 120_000, 0, CANCELLED]],
        "cancelled",
    ),
    "cancelled before the end of its second attempt is written": (
        [*run(100, 1, "~"), *run(110, 2), ["x", 120_000, 0, CANCELLED], ["~", 112_000, 1, {}]],
        "cancelled",
    ),
    "cancelled before anybody had it": ([["x", 120_000, 0, CANCELLED]], "cancelled"),
    "an id that is used again after a failure": (
        [*run(100, 1, "~"), *run(110, 2, "-"), *run(120, 1, "+")],
        "succeeded",
    ),
    "the same, with the first attempt forgotten": (
        [*run(110, 2, "-"), *run(200, 1, "~")],
        "retrying",
    ),
    "an id that is used again after it was cancelled": (
        [*run(100, 1, "~"), ["x", 120_000, 0, CANCELLED], *run(121, 1)],
        "running",
    ),
    "replaced, and nobody has the other task": ([*run(100, 1, "x", REPLACED)], "replaced"),
    "a replacement that fails after a retry of the first task": (
        [*run(100, 1, "~"), *run(110, 2, "x", REPLACED), *run(112, OTHER, "-")],
        "failed",
    ),
    "a replacement that ends before the first task": (
        [
            *run(110, 2),
            *run(108, OTHER, "~"),
            ["x", 114_000, 1, REPLACED],
            *run(112, OTHER + 1, "+"),
        ],
        "succeeded",
    ),
    "a replacement that is cancelled": (
        [*run(110, 2, "x", REPLACED), *run(113, OTHER, "~"), ["x", 120_000, 0, CANCELLED]],
        "cancelled",
    ),
    "an id that is used again after it was replaced": (
        [*run(110, 1, "x", REPLACED), *run(113, OTHER, "-"), *run(117, 1, "+")],
        "succeeded",
    ),
    "given back, and received elsewhere": (
        [["r", 100_000, 0, "w:1:a"], ["b", 101_000, 0, {}], *run(102, 1, "+")],
        "succeeded",
    ),
    "given back": ([["r", 100_000, 0, "w:1:a"], ["b", 101_000, 0, {}]], "unknown"),
    "put back by itself, and run again": (
        [*run(100, 1, "x", {"why": "rejected"}), *run(103, 1, "-")],
        "failed",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_last_step_is_the_last_that_happened(case: str) -> None:
    rows, state = CASES[case]
    assert history(*rows).state == state


def test_all_steps_are_there_and_have_attempts() -> None:
    found = history(*run(100, 1, "~"), *run(110, 2), ["x", 120_000, 0, CANCELLED])
    assert [(step.event, step.attempt) for step in found.steps] == [
        *(("received", 1), ("started", 1), ("retrying", 1)),
        *(("received", 2), ("started", 2), ("cancelled", 2)),
    ]


def test_histories_of_two_queues_are_one() -> None:
    first, second = history(*run(100, 1, "~"), *run(120, 3)), history(*run(98, 2, "~"))
    found = first.after([second])
    assert [step.attempt for step in found.steps] == [1, 1, 1, 2, 2, 2, 3, 3]


def test_a_text_may_have_any_letters() -> None:
    said = "\u2028\x85 é ü 你好"
    found = history(*run(100, 1, "-", {"error": "E", "message": said}))
    assert found.failure is not None
    assert found.failure.message == said
