"""Policies as plain data, which others may read who have not the code that declared them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import date, timedelta
from inspect import Parameter, signature
from typing import Any

from kombu_delayed.message.durations import exact_text, parse_ms, parse_rate

from .limits.fair import Fair, Order
from .limits.limit import Drain, Limit, Shares
from .limits.limit_use import LimitUse
from .policy import Policy, PolicyError
from .retry.strategies import Backoff
from .times.catch_up import DropOlder, Latest, Spread
from .times.timeout import Timeout
from .times.window import Window

#: What can be made from data alone, by its name.
KINDS: dict[str, type[Policy]] = {
    each.__name__: each
    for each in (
        *(Backoff, Drain, DropOlder, Fair, Latest, Limit, LimitUse),
        *(Order, Shares, Spread, Timeout, Window),
    )
}

#: What stands for a policy of another class, and for a function: only code makes these.
OWN, CODE = "own", "code"

#: Arguments that are lengths of time, and rates: written in one way however they are given.
_LENGTHS = frozenset({"after", "gather", "max_age", "over", "soft", "than"})
_RATES = frozenset({"rate"})


def written(policy: Policy) -> dict[str, Any]:
    """A policy as JSON has it: its kind, and its arguments that are not the default ones.

    The same for whatever means the same: the order of a dict, "1h" and 3600. Functions are their
    module and name. What may hold a secret, and classes of users, are only named.
    """
    kind = type(policy)
    if KINDS.get(kind.__name__) is not kind:
        return {OWN: [code_name(kind), repr(policy)]}
    args, kwargs = policy._arguments
    parameters = signature(kind).parameters
    bound = signature(kind).bind(*args, **kwargs)
    given = {name: _plain(name, value) for name, value in bound.arguments.items()}
    return {
        kind.__name__: {
            name: given[name]
            for name in sorted(given)
            if given[name] != _plain(name, parameters[name].default)
        }
    }


def restored(found: Any, code: Code | None = None) -> Policy:
    """The policy that was written so. Raises PolicyError where this process cannot make it."""
    if not (isinstance(found, Mapping) and len(found) == 1):
        raise PolicyError(f"{found!r} is not a policy: it is a kind with its arguments")
    ((kind, given),) = found.items()
    code = code or Code(())
    if kind == OWN:
        return code.policy(*given)
    made = KINDS.get(kind)
    if made is None:
        known = ", ".join(KINDS)
        raise PolicyError(f"there is no policy {kind!r} in this version: it knows {known}")
    if not isinstance(given, Mapping):
        raise PolicyError(f"{kind} takes a mapping of its arguments, not {given!r}")
    arguments = {name: code.value(value) for name, value in given.items()}
    parameters = signature(made).parameters.values()
    rest = [each.name for each in parameters if each.kind is Parameter.VAR_POSITIONAL]
    positional = [item for name in rest for item in arguments.pop(name, ())]
    try:
        return made(*positional, **arguments)
    except TypeError as error:
        raise PolicyError(f"{kind}: {error}") from error


class Code:
    """The functions and classes that the policies of this process have, by their names."""

    def __init__(self, policies: Iterable[Policy]) -> None:
        self._policies: dict[tuple[str, str], Policy] = {}
        self._functions: dict[str, set[Callable[..., Any]]] = {}
        for each in policies:
            self._policies[code_name(type(each)), repr(each)] = each
            args, kwargs = each._arguments
            for value in (*args, *kwargs.values()):
                if callable(value):
                    self._functions.setdefault(code_name(value), set()).add(value)

    def policy(self, name: str, text: str) -> Policy:
        """The policy of a class of that name. Raises PolicyError."""
        found = self._policies.get((name, text))
        if found is None:
            raise PolicyError(f"the policy {text} of {name} is not declared here")
        return found

    def value(self, given: Any) -> Any:
        """An argument as it was. Raises PolicyError for a function that is not known."""
        if not (isinstance(given, Mapping) and given.keys() == {CODE}):
            return given
        found = self._functions.get(given[CODE], set())
        if len(found) != 1:
            why = "several have that name" if found else "no policy here has it"
            raise PolicyError(f"the function {given[CODE]} is not known here: {why}")
        return next(iter(found))


def code_name(code: Any) -> str:
    """What a function or a class is called in all processes that have it."""
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
