"""Values as text for display: arguments as in Celery, and untrusted text made harmless."""

from __future__ import annotations

from typing import Any

from celery.utils.saferepr import saferepr

_NUMBERS = frozenset({int, float, bool})


def printable(text: str, kept: str = "") -> str:
    """Replace characters that move a cursor, hide text or cannot be sent, unless in `kept`."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in kept else "\N{REPLACEMENT CHARACTER}" for each in text
    )


def short_repr(value: Any, limit: int, levels: int) -> str:
    """The `saferepr` of arguments: at most about `limit` characters and `levels` deep."""
    text = _plain(value, levels) if levels else None  # 0: no limit of depth
    if text is None or len(text) >= limit:
        return saferepr(value, limit, maxlevels=levels)
    return text


def _plain(value: Any, levels: int) -> str | None:
    """The text of a plain value, or None for any other."""
    kind = type(value)
    if kind is str:
        return "'" + value.replace("'", "\\'") + "'"
    if kind in _NUMBERS:
        return str(value)
    if value is None:
        return "None"
    if kind is tuple or kind is list:
        return _sequence(value, levels - 1)
    return _mapping(value, levels - 1) if kind is dict else None


def _sequence(value: Any, levels: int) -> str | None:
    parts = [_plain(each, levels) for each in value] if levels >= 0 else ["..."]
    if None in parts:
        return None
    text = ", ".join(parts)  # type: ignore[arg-type]
    if type(value) is list:
        return f"[{text}]"
    return f"({text},)" if len(value) == 1 else f"({text})"


def _mapping(value: dict[Any, Any], levels: int) -> str | None:
    if levels < 0:
        return "{...}"
    parts = []
    for key, each in value.items():
        text = _plain(each, levels)
        if type(key) is not str or text is None:
            return None
        parts.append(f"'{key}': {text}" if "'" not in key else f"{_plain(key, 0)}: {text}")
    return "{" + ", ".join(parts) + "}"
