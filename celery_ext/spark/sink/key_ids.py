"""Makes ids of tasks from key columns: the same id for the same values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date, datetime, timezone
from hashlib import sha1
from typing import Any
from uuid import UUID

from celery_ext.control.bulk.rows import RowError

from ..arrow import Unreadable

#: The UUID namespace of these ids.
NAMESPACE = UUID("6c1c2f0e-8d35-5f0e-9a53-6b1f6d1f3c7a")


def key_id(values: Iterable[Any]) -> str:
    """The id for the values of key columns.

    Raises RowError if one is null, or NaN, which pandas uses for a missing number.
    """
    texts = [_key_text(value) for value in values]
    if None in texts:
        raise RowError("a key column is null, so that the row has no id")
    if unreadable := next((each for each in texts if isinstance(each, Unreadable)), None):
        raise RowError(f"a key column has {unreadable}")
    # Like uuid5, without its objects, which would double the time.
    text = sha1(NAMESPACE.bytes + json.dumps(texts).encode(), usedforsecurity=False).hexdigest()
    variant = "89ab"[int(text[16], 16) & 3]
    return f"{text[:8]}-{text[8:12]}-5{text[13:16]}-{variant}{text[17:20]}-{text[20:32]}"


def _key_text(value: Any) -> Any:
    if isinstance(value, datetime):
        return (value.astimezone(timezone.utc) if value.tzinfo else value).isoformat()
    if isinstance(value, date):
        return value.isoformat()
    if value is None or value != value:
        return None
    return value if isinstance(value, (str, int, float)) else str(value)
