"""Validates the settings of an app that are dicts of options."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, fields
from typing import Any, TypeVar

from kombu_delayed.connection.options import PREFIX, Options, span
from kombu_delayed.errors import OptionError

T = TypeVar("T")


def option(default: Any, meaning: str, least: float = 0, most: float = 0) -> Any:
    """A field of a dataclass of options; numbers have a range."""
    metadata = {"meaning": meaning, "least": least, "most": most}
    return field(default=default, metadata=metadata)


def parse(kind: type[T], setting: str, given: Any) -> T:
    """Validate a dict of options. Raises OptionError that names the option and the value."""
    if not isinstance(given, Mapping):
        raise OptionError(f"{setting} takes a dict of options, not {given!r}")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            hint = suggestion(str(name), known, "there are")
            raise OptionError(f"unknown option {name!r} in {setting}{hint}")
    return kind(**{name: _checked(setting, known[name], value) for name, value in given.items()})


def misplaced(settings: Mapping[str, Any]) -> str:
    """A sentence about transport options that stand among Celery's settings, or nothing."""
    known = [PREFIX + each.name for each in fields(Options)]
    names = [name for name in known if settings.get(name) is not None]
    text = f"the setting {', '.join(names)} has no effect: move it into broker_transport_options"
    return text if names else ""


def suggestion(name: str, known: Collection[str], all_are: str) -> str:
    """The end of an error about an unknown name: the closest known name, or all of them."""
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; {all_are} {', '.join(known)}"


def _checked(setting: str, option: Any, value: Any) -> Any:
    name, default = f"{setting}[{option.name!r}]", option.default
    if isinstance(default, tuple):
        texts = [*value] if isinstance(value, Iterable) and not isinstance(value, str) else [None]
        if not all(isinstance(each, str) and each for each in texts):
            raise OptionError(f"{name} takes a list of texts")
        return tuple(texts)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise OptionError(f"{name} takes True or False, not {value!r}")
        return value
    if isinstance(default, str):
        if not isinstance(value, str):
            raise OptionError(f"{name} takes a text, not {value!r}")
        return value
    whole = isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise OptionError(f"{name} takes a {'whole ' if whole else ''}number, not {value!r}")
    if not option.metadata["least"] <= value <= option.metadata["most"]:
        raise OptionError(f"{name} takes {span(option)}, not {value!r}")
    return value if whole else float(value)
