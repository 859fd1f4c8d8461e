"""Short forms of messages, as they look in each state."""

from __future__ import annotations

import json
from typing import Any

from ..store import Entry


def message(body: str, **extra: Any) -> str:
    """Return a message of Kombu's as JSON; `extra` are members of its envelope."""
    return json.dumps({"body": body, "properties": {}, **extra}, separators=(",", ":"))


def promoted(text: str, due_ms: int) -> str:
    """Return the form of a message in a ready list that has waited in the backlog."""
    return f'{{"due_ms":{due_ms},{text[1:]}'


def returned(text: str, deliveries: int) -> str:
    """Return the form of a message that came back from a consumer."""
    return f'{text[:-1]},"deliveries":{deliveries}}}'


def entry(id: str, due: int | str = "", step: int = 0, body: str | None = None) -> Entry:
    """Return a message on its way into a queue; its body is its id unless told otherwise."""
    return Entry(id, step, message(id if body is None else body), str(due))
