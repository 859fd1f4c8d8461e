"""Policies as plain data, readable by programs without the code that declared them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, timedelta
from inspect import Parameter, signature
from typing import Any

from kombu_delayed.message.durations import exact_text, parse_ms, parse_rate

from .limits.fair import Fair, Order
from .limits.limit import Drain, Limit, LimitUse, Shares
from .policy import Policy, PolicyError
from .retry.strategies import Backoff
from .times.catch_up import DropOlder, Latest, Spread
from .times.timeout import Timeout
from .times.window import Window

#: The policies that can be made from data alone, by name.
KINDS: dict[str, type[Policy]] = {
    each.__name__: each
    for each in (
        *(Backoff, Drain, DropOlder, Fair, Latest, Limit, LimitUse),
        *(Order, Shares, Spread, Timeout, Window),
    )
}

_SIGNATURES = {name: signature(KINDS[name]) for name in KINDS}

#: Placeholders for a policy of another class and for a function, which only code can make.
OWN, CODE = "own", "code"

#: Arguments that are lengths of time, and rates. They are written in one way, however given.
_LENGTHS = frozenset({"after", "gather", "max_age", "over", "soft", "than"})
_RATES = frozenset({"rate"})
#: Arguments that may be iterators, which are used up: the policy's own values are written.
_USED_UP = frozenset({"except_dates"})

#: The address of an object in the memory of one process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def written(policy: Policy) -> dict[str, Any]:
    """Return a policy as JSON data: its kind, and its arguments that are not the defaults.

    Equivalent policies give the same data: dicts in any order, "1h" and 3600. A function is given
    by module and name. A policy that may hold a secret, or of a user's class, is only named.
    """
    found: dict[str, Any] | None = getattr(policy, "_written", None)
    if found is None:
        found = _written(policy)
        object.__setattr__(policy, "_written", found)
    return found


def text_of(policy: Policy) -> str:
    """Return the same as text."""
    text: str | None = getattr(policy, "_text", None)
    if text is None:
        text = json.dumps(written(policy), sort_keys=True)
        object.__setattr__(policy, "_text", text)
    return text


def _written(policy: Policy) -> dict[str, Any]:
    kind = type(policy)
    if KINDS.get(kind.__name__) is not kind:
        return {OWN: [code_name(kind), _ADDRESS.sub("", repr(policy))]}
    args, kwargs = policy._arguments
    parameters = _SIGNATURES[kind.__name__].parameters
    given = {
        name: _plain(name, getattr(policy, name, value) if name in _USED_UP else value)
        for name, value in _SIGNATURES[kind.__name__].bind(*args, **kwargs).arguments.items()
    }
    return {
        kind.__name__: {
            name: given[name]
            for name in sorted(given)
            if given[name] != _plain(name, parameters[name].default)
        }
    }


def restored(found: Any, code: Code | None = None) -> Policy:
    """Return the policy for what `written` returned. Raises PolicyError if this process cannot."""
    try:
        return _restored(found, code or Code(()))
    except PolicyError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PolicyError(f"{found!r:.200} is not a policy: {error}") from error


def _restored(found: Any, code: Code) -> Policy:
    if not (isinstance(found, Mapping) and len(found) == 1):
        raise PolicyError(f"{found!r} is not a policy: it is a kind with its arguments")
    ((kind, given),) = found.items()
    if kind == OWN:
        return code.policy(*given)
    made = KINDS.get(kind)
    if made is None:
        known = ", ".join(KINDS)
        raise PolicyError(f"there is no policy {kind!r} in this version: it knows {known}")
    if not isinstance(given, Mapping):
        raise PolicyError(f"{kind} takes a mapping of its arguments, not {given!r}")
    arguments = {name: code.value(value) for name, value in given.items()}
    parameters = _SIGNATURES[kind].parameters.values()
    rest = [each.name for each in parameters if each.kind is Parameter.VAR_POSITIONAL]
    positional = [item for name in rest for item in arguments.pop(name, ())]
    try:
        return made(*positional, **arguments)
    except TypeError as error:
        raise PolicyError(f"{kind}: {error}") from error


class Code:
    """The functions and classes that the policies of this process use, by name."""

    def __init__(self, policies: Iterable[Policy]) -> None:
        self._policies: dict[str, list[Policy]] = {}
        self._functions: dict[str, list[Callable[..., Any]]] = {}
        for each in policies:
            ((kind, text),) = written(each).items()
            if kind == OWN:
                self._policies.setdefault(str(text), []).append(each)
            args, kwargs = each._arguments
            for value in filter(callable, (*args, *kwargs.values())):
                self._functions.setdefault(code_name(value), []).append(value)

    def policy(self, name: str, text: str) -> Policy:
        """Return the policy with this class name and text. Raises PolicyError."""
        return _only(f"the policy {text} of {name}", self._policies.get(str([name, text]), []))

    def value(self, given: Any) -> Any:
        """Return an argument as it was. Raises PolicyError for an unknown function."""
        if not (isinstance(given, Mapping) and given.keys() == {CODE}):
            return given
        return _only(f"the function {given[CODE]}", self._functions.get(given[CODE], []))


def _only(what: str, found: list[Any]) -> Any:
    """Return the only object with a name. Several with that name cannot be told apart."""
    if not found or any(each is not found[0] for each in found):
        why = "several here have that name" if found else "no policy here has it"
        raise PolicyError(f"{what} is not known here: {why}")
    return found[0]


def code_name(code: Any) -> str:
    """Return the name of a function or a class in all processes that have it."""
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}:{named.__qualname__}"


def _plain(name: str, value: Any) -> Any:
    if value is None or value is Parameter.empty:
        return None
    if name in _LENGTHS or isinstance(value, timedelta):
        return exact_text(parse_ms(value))
    if name in _RATES:
        return str(parse_rate(value))
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): value[key] for key in sorted(value, key=str)}
    if isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        return {CODE: code_name(value)}
    return sorted(map(str, value)) if name == "except_dates" else [*value]
