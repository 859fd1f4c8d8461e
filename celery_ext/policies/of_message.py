"""The policies of a single message: checked and written where it is sent, read where it is run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from kombu_delayed.consumer.policy import decisions
from kombu_delayed.consumer.policy.of_message import HEADER

from . import policy
from .limits.limit import LimitUse
from .policy import Policy, PolicyError, checked
from .retry.strategies import STRATEGY_HEADER, Backoff, RetryStrategy
from .times.catch_up import DropOlder, Spread
from .times.timeout import Timeout
from .times.window import Window
from .written import restored, written

#: The policies that a message may have. The others are about what many messages share.
KINDS: tuple[type[Policy], ...] = (Backoff, DropOlder, LimitUse, Spread, Timeout, Window)

#: The maximum length of the header: each message carries it, and a worker reads all of it.
MOST_LENGTH = 4_000

_WHERE = "policies=[…] of a message"


def write(given: Any) -> str:
    """Return the header for these policies, which may be plain data. Raises PolicyError."""
    text = _text(given)
    if len(text) > MOST_LENGTH:
        raise PolicyError(
            f"{_WHERE}: {len(text):,} characters as JSON, and at most {MOST_LENGTH:,}"
        )
    return text


def _text(given: Any) -> str:
    if not isinstance(given, (list, tuple)):
        raise PolicyError(f"{_WHERE}: policies are a list, not {given!r}")
    policies = [restored(each) if isinstance(each, Mapping) else each for each in given]
    _check(policies)
    return json.dumps([written(each) for each in policies], separators=(",", ":"))


def policies_in(headers: Mapping[str, Any] | None) -> tuple[Policy, ...]:
    """Return the policies of a message. Raises PolicyError if this version does not know one."""
    text = (headers or {}).get(HEADER)
    return read(str(text)) if text else ()


@lru_cache(1024)
def read(text: str) -> tuple[Policy, ...]:
    """Return the policies in a header. Raises PolicyError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise PolicyError(f"header {HEADER}: {text!r:.200} is no JSON") from error
    if not isinstance(found, list):
        raise PolicyError(f"header {HEADER} has a list, not {text!r:.200}")
    return _check([*map(restored, found)])


def _check(policies: list[Any]) -> tuple[Policy, ...]:
    for each in policies:
        if isinstance(each, Policy) and type(each) not in KINDS:
            known = ", ".join(kind.__name__ for kind in KINDS)
            raise PolicyError(
                f"{_WHERE} takes {known}, and not {each}: declare that for its task or its queue"
            )
    return checked(_WHERE, policies, is_of_message=True)


@lru_cache(1024)
def strategy_text(strategy: RetryStrategy | None) -> str | None:
    """Return the header for a retry strategy, or None if only code can make that."""
    if strategy is not None and type(strategy) not in KINDS:
        return None
    return _text([strategy] if strategy else [])  # a queue or a task may have a longer one


def strategies_in(headers: Mapping[str, Any]) -> tuple[Policy, ...] | None:
    """Return the strategy, if any, that the consumer of a message has set; None: it set nothing."""
    text = headers.get(STRATEGY_HEADER)
    return None if text is None else read(str(text))


def use_messages() -> None:
    """Allow messages that this process sends to have policies. Idempotent."""
    decisions.write = write
    policy.to_json = written
