"""Messages that wait for an answer, as seen by the transport."""

from __future__ import annotations

import json
from typing import Any

from kombu_delayed.inspection.expectations import ANSWER_HEADER, Answer, Correlation, Early, Reply
from kombu_delayed.store.store import Entry
from tests.kit.state import message

TIMEOUT_MS = 1_000
KEPT_MS = 100_000
EARLY = Early(kept_ms=5_000, limit=3)


def question(id: str, name: str = "n", step: int = 0) -> Entry:
    headers = {"id": id, ANSWER_HEADER: None, "delayed_unique": name}
    return Entry(id, step, message(id, headers=headers))


def answer_in(text: bytes) -> str | None:
    found: dict[str, Any] = json.loads(text)["headers"]
    return found[ANSWER_HEADER]


def ask(correlation: Correlation, id: str, name: str = "n", timeout_ms: int = TIMEOUT_MS) -> str:
    return correlation.expect(name, question(id, name), timeout_ms, KEPT_MS).said


def say(
    correlation: Correlation,
    text: str,
    name: str = "n",
    *,
    state: str = "answered",
    id: str = "",
    early: Early = EARLY,
) -> Reply:
    """Answer with a text, whose id is the text by default."""
    return correlation.respond(name, Answer(id or text, state, text), KEPT_MS, early)
