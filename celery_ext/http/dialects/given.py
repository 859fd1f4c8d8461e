"""The input of the dialects' clients: JSON as Go programs write it."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.functional_validators import BeforeValidator

from ..api.fields import SPAN_SCHEMA, span_of

#: The most characters of a length of time. Go writes at most 25, and the last thousand are cached.
LENGTH_SIZE = 100

_SECONDS = {
    "ns": 1e-9,
    **dict.fromkeys(("us", "µs", "μs"), 1e-6),
    "ms": 0.001,
    **{"s": 1, "m": 60, "h": 3_600},
}
# In a pattern that could read digits in two ways, such as `\d+\.?\d*`, long text takes hours.
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|[smh])")
_LENGTH = re.compile(rf"\+?(?:{_PART.pattern})+")


def _read_length(value: Any) -> Any:
    """Convert a length of time of Go to seconds; others stay. Raises ValueError for neither."""
    if isinstance(value, str) and len(value) > LENGTH_SIZE:
        raise ValueError(f"text of over {LENGTH_SIZE} characters is not a length of time")
    if isinstance(value, str) and _LENGTH.fullmatch(value):
        value = sum(float(count) * _SECONDS[unit] for count, unit in _PART.findall(value))
    if isinstance(value, (str, int, float)):
        span_of(value)
    return value


_LENGTH_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "string",
            "pattern": rf"^(\+?({_PART.pattern})+|(\d+(\.\d+)?(ms|[smhdw]))+)$",
            "maxLength": LENGTH_SIZE,
        },
        SPAN_SCHEMA["anyOf"][1],
    ]
}

#: A `Span`, or a duration as Go writes it: `1h0m0.5s`, `250µs`.
Length = Annotated[
    float | str, BeforeValidator(_read_length), Field(json_schema_extra=_LENGTH_SCHEMA)
]


#: The largest number that is accepted as text, and the types of the fields that accept one.
MOST = 2**63
_TEXTS = (str, str | None)


def _text(value: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return str(value) if is_number and abs(value) <= MOST else value


def _no_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("it is not a number")
    return value


#: Refuses true and false for whole numbers.
NO_TRUTH = BeforeValidator(_no_truth)


def _with_numbers(schema: dict[str, Any]) -> None:
    """State in a schema that text fields also accept numbers."""
    for name, each in schema.get("properties", {}).items():
        if each.get("type") == "string":
            about = {key: each[key] for key in ("title", "description", "default") if key in each}
            text = {key: each[key] for key in each if key not in about}
            number = {"type": "number", "minimum": -MOST, "maximum": MOST}
            schema["properties"][name] = {**about, "anyOf": [text, number]}


class Given(BaseModel):
    """Ignores unknown fields, and accepts numbers for text and names in any case, as Go does."""

    model_config = ConfigDict(json_schema_extra=_with_numbers)

    @model_validator(mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {name.lower(): name for name in cls.model_fields}
        renamed = {known.get(str(name).lower(), name): value for name, value in given.items()}
        renamed |= {name: given[name] for name in cls.model_fields if name in given}
        texts = {name for name, each in cls.model_fields.items() if each.annotation in _TEXTS}
        return {name: _text(v) if name in texts else v for name, v in renamed.items()}
