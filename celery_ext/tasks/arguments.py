"""Conditions on the arguments of tasks, such as `args.customer_id == 7`."""

from __future__ import annotations

import json
import operator
import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from kombu.serialization import loads

from ..errors import QueryError

#: Content types that are safe to read, even from an untrusted writer.
SAFE = ("application/json", "application/x-yaml", "application/x-msgpack")

#: The functions of Celery's `compression`, without Kombu's, which have no limit. Some builds of
#: Python lack bz2.
_DECOMPRESSORS = {
    "application/x-gzip": ("zlib", "decompressobj"),
    "application/x-bz2": ("bz2", "BZ2Decompressor"),
}

#: The maximum length of a body that was compressed.
LONGEST_BYTES = 64 * 2**20

#: Maximum length of a text with conditions.
LONGEST = 1_000

MOST_CONDITIONS = 10

_AND = re.compile(r"\s+and\s+(?=kwargs\b|args\b)")

_CONDITION = re.compile(
    r"(?P<path>(?:kw)?args(?:\.[\w-]+)*)"
    r"(?:\s*(?P<sign>==|!=|<=|>=|<|>|~)\s*|\s+(?P<word>contains)\s+)(?P<value>.*)",
    re.DOTALL,
)

_QUOTED = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)

#: Unquoted values that are probably the end of an operator, or that contain another condition.
_DOUBTFUL = re.compile(
    r"[=!<>~'\"].*|.*(\band\b|\bor\b|&&|\|\|)\W*(not\b\W*)?(kwargs|args)\b.*",
    re.DOTALL | re.IGNORECASE,
)

_WORDS = {"True": True, "False": False, "None": None}

_MISSING = object()


def _is_equal(found: Any, given: Any) -> bool:
    is_alike = isinstance(found, bool) == isinstance(given, bool)
    return bool(is_alike and found == given) or _text(found) == _text(given)


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def both(found: Any, given: Any) -> bool:
        numbers = all(type(each) in (int, float) for each in (found, given))
        return (numbers or type(found) is type(given) is str) and compare(found, given)

    return both


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": _is_equal,
    "<": _ordered(operator.lt),
    "<=": _ordered(operator.le),
    ">": _ordered(operator.gt),
    ">=": _ordered(operator.ge),
    "~": lambda found, given: fnmatchcase(_text(found), _text(given)),
    "contains": lambda found, given: _text(given) in _text(found),
}


@dataclass(frozen=True)
class Condition:
    """A condition on the argument that `path` leads to, from positional and keyword arguments."""

    path: tuple[str, ...]
    sign: str
    value: Any

    def is_true(self, arguments: tuple[Any, Any]) -> bool:
        """Returns whether a task with these arguments matches. In a list, any value may match."""
        found = _at(self.path, arguments)
        if found is _MISSING:
            return False
        if self.sign == "!=":
            return not any(_is_equal(each, self.value) for each in _leaves(found))
        return any(_OPERATORS[self.sign](each, self.value) for each in _leaves(found))


def conditions(text: str) -> tuple[Condition, ...]:
    """Parse conditions that are joined with `and`, at most ten. Raises QueryError."""
    if not isinstance(text, str) or not text.strip() or len(text) > LONGEST:
        raise QueryError(f"where={text!r} is not text of 1 to {LONGEST} characters")
    found = _AND.split(text.strip())
    if len(found) > MOST_CONDITIONS:
        raise QueryError(f"where={text!r} has {len(found)} conditions: at most {MOST_CONDITIONS}")
    return tuple(map(_condition, found))


def _condition(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    if found is None or not found["value"].strip():
        raise QueryError(
            f"where={text!r} is not a condition: give an argument, an operator and a value, such "
            "as args.customer_id == 7, args.0 ~ *@example.org or args contains ada"
        )
    path, value = tuple(found["path"].split(".")), found["value"].strip()
    if not _QUOTED.fullmatch(value) and _DOUBTFUL.fullmatch(value):
        raise QueryError(
            f"where={text!r}: the value {value!r} looks like an operator or another condition. "
            "Operators are == != < <= > >= ~ contains; conditions are joined with `and`; put "
            "other text in quotes"
        )
    return Condition(path, found["sign"] or found["word"], _value(value))


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, (list, dict)) else value


def _at(path: tuple[str, ...], arguments: tuple[Any, Any]) -> Any:
    """The value that a path leads to; numbers after `args` are positions."""
    args, kwargs = arguments
    root, *names = path
    found = kwargs if root == "kwargs" else [args, kwargs]
    if root == "args" and names:
        found = args if names[0].isdecimal() else kwargs
    for name in names:
        if isinstance(found, Mapping):
            found = found.get(name, _MISSING)
        elif isinstance(found, (list, tuple)) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return _MISSING
    return found


def _leaves(value: Any) -> Iterator[Any]:
    """The values in lists and objects, at any depth; any other value is yielded itself.

    In YAML, a list or an object can be in many places, and also in itself: each is read once.
    """
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, (Mapping, list, tuple)):
            yield each
        elif id(each) not in seen:
            seen.add(id(each))
            waiting += each.values() if isinstance(each, Mapping) else each


def _text(value: Any) -> str:
    """A value as in JSON, but strings without quotes."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def _decompressed(body: bytes, compression: str) -> bytes:
    """A body before `compression`. Raises an error if that is unknown, or the body is too long."""
    module, name = _DECOMPRESSORS[compression]
    decompressor = getattr(import_module(module), name)()
    found: bytes = decompressor.decompress(body, LONGEST_BYTES)
    if not decompressor.eof:
        raise ValueError(f"it has more than {LONGEST_BYTES} bytes")
    return found


def arguments_of(payload: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Positional and keyword arguments in a message; None if they cannot be read safely."""
    body: Any = payload.get("body")
    properties, headers = payload.get("properties"), payload.get("headers")
    kind, encoding = payload.get("content-type"), payload.get("content-encoding")
    compression = headers.get("compression") if isinstance(headers, Mapping) else None
    try:
        if isinstance(properties, Mapping) and properties.get("body_encoding") == "base64":
            body = b64decode(body or "")
        if compression:
            body = _decompressed(body, compression)
        found = json.loads(body or "") if kind == SAFE[0] else loads(body, kind, encoding, SAFE)
    except Exception:  # a serializer may raise anything
        return None
    if isinstance(found, (list, tuple)) and len(found) >= 2:
        return found[0], found[1]
    return None
