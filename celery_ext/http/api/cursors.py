"""Where the next page begins, as text that means nothing to who passes it on."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

from ..problems import Problem


def write(*parts: Any) -> str:
    """A cursor."""
    return urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def read(text: str, *kinds: type) -> list[Any]:
    """Its parts. Raises a Problem where it is no cursor of this kind."""
    try:
        parts = json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if [type(part) for part in parts] == list(kinds):
            for part in parts:
                str(part).encode(errors="surrogateescape")  # as names of keys are written
            return list(parts)
    except (ValueError, TypeError, RecursionError):
        pass
    raise Problem.of_field("cursor", "it is not one that this server has given")
