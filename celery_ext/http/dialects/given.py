"""What clients of the dialects send: JSON as Go programs write it."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.functional_validators import BeforeValidator

from ..api.fields import SPAN_SCHEMA, span_of

_SECONDS = {
    "ns": 1e-9,
    **dict.fromkeys(("us", "µs", "μs"), 1e-6),
    "ms": 0.001,
    **{"s": 1, "m": 60, "h": 3_600},
}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|[smh])")
_LENGTH = re.compile(rf"\+?(?:{_PART.pattern})+")


def _read_length(value: Any) -> Any:
    """Go's lengths of time in seconds, all others as they are. Raises ValueError for neither."""
    if isinstance(value, str) and _LENGTH.fullmatch(value):
        value = sum(float(count) * _SECONDS[unit] for count, unit in _PART.findall(value))
    if isinstance(value, (str, int, float)):
        span_of(value)
    return value


#: As `Span`, and as Go writes its durations: `1h0m0.5s`, `250µs`.
Length = Annotated[float | str, BeforeValidator(_read_length), Field(json_schema_extra=SPAN_SCHEMA)]


class Given(BaseModel):
    """Clients may send more than is read, numbers for text, and names in any case, as to Go."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {name.lower(): name for name in cls.model_fields}
        renamed = {known.get(str(name).lower(), name): value for name, value in given.items()}
        return renamed | {name: given[name] for name in cls.model_fields if name in given}
