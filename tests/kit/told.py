"""Entries of a stream of lifecycle events, as written by the moves."""

from __future__ import annotations

import json
from typing import Any


def told(
    id: str = "",
    *,
    event: str = "acked",
    task: str = "mail",
    tenant: str = "",
    due_ms: int | None = None,
    consumer: str = "w1@host:7:abcd",
    deliveries: int = 0,
    reason: str = "",
) -> dict[Any, Any]:
    facts = [event, id, task, tenant, due_ms, consumer, deliveries, *filter(None, [reason])]
    return {"v": 2, "event": json.dumps(facts, ensure_ascii=False)}
