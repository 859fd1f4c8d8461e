"""The transport's own options: one home for name, default, range and meaning."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import OptionError

PREFIX = "delayed_"


def _option(default: Any, meaning: str, least: float = 0, most: float = float("inf")) -> Any:
    return field(default=default, metadata={"meaning": meaning, "least": least, "most": most})


@dataclass(frozen=True)
class Options:
    """Options that begin with `delayed_` in `broker_transport_options`."""

    lease_seconds: float = _option(
        30.0,
        "How long a consumer that stops answering keeps its unacknowledged messages before others "
        "get them. It is renewed from a thread of its own, however long a task runs.",
        least=1,
        most=86_400,
    )
    poll_seconds: float = _option(
        5.0,
        "How often a consumer that hears nothing looks by itself. It heals lost wake tokens and "
        "finds what the stock Redis transport published. The more consumers, the rarer each looks.",
        least=0.1,
        most=60,
    )
    reconnect_seconds: float = _option(
        60.0,
        "How long a consumer tries to reconnect by itself before the lost connection surfaces in "
        "Celery. With failover URLs it surfaces at once, so that the next URL gets its turn.",
        most=3_600,
    )
    partition_size: int | None = _option(
        None,
        "How many delayed messages one partition of the backlog holds before it splits. "
        "Default: the server's `zset-max-listpack-entries`, where the encoding is most compact.",
        least=2,
        most=100_000,
    )
    promote_batch: int = _option(
        250,
        "How many due messages one call moves to the ready lists at most. More in a call means a "
        "longer pause for the server's other clients.",
        least=1,
        most=1_000,
    )
    max_deliveries: int = _option(
        20,
        "How often a message is delivered before it is buried as poison. What counts is a delivery "
        "that ended with a lost lease or a reject with requeue, not an orderly end. 0: any number.",
        most=1_000_000,
    )
    dead_limit: int = _option(
        100_000,
        "How many dead letters a queue keeps; beyond it the oldest go.",
        least=1,
        most=100_000_000,
    )
    dead_seconds: float = _option(
        90 * 86_400.0,
        "How long a queue keeps a dead letter.",
        least=60,
        most=10 * 366 * 86_400,
    )
    events: int = _option(
        10_000,
        "About how many lifecycle events each queue keeps, the newest, of some 120 bytes each: the "
        "stream that reports and dashboards read. 0: none are written.",
        most=100_000_000,
    )
    clock_skew_warning_seconds: float = _option(
        10.0,
        "A clock that differs by more from the server's is warned of when connecting: an ETA is a "
        "time by the clock of who sends it, and due by the server's. 0: never.",
        most=86_400,
    )
    shards: int | Mapping[str, int] = _option(
        1,
        "Over how many shards queues are spread: a number for all, or a dict with a number for "
        "some by name. Each shard is a queue of its own in Redis, and so a Cluster can have them "
        "on several nodes. Consumers need no option to find them.",
        least=1,
        most=1_000,
    )
    consumer_name: str | None = _option(
        None,
        "What this process is called in lists of consumers and in lifecycle events. Default: the "
        "name of the worker where `celery_ext` is installed, else that of the host.",
        most=200,
    )
    replicas_to_wait: int = _option(
        0,
        "How many replicas must have a message before sending it counts as done: a failover to one "
        "of them does not lose it. Fewer in time raise `NotReplicated`. 0: the master alone.",
        most=100,
    )
    replica_timeout_seconds: float = _option(
        1.0,
        "How long sending waits for `delayed_replicas_to_wait`. Less than `socket_timeout`.",
        least=0.01,
        most=60,
    )
    policies: Mapping[str, Sequence[Any]] | None = _option(
        None,
        "Lists of policies from `celery_ext.policies` that decide of the messages of a queue, by "
        "its name. Producers and workers should have the same. Default: none.",
    )
    unsafe_server: bool = _option(
        False,
        "Use a server that may lose messages all the same: one that evicts keys when it is full.",
    )

    def shards_of(self, queue: str) -> int:
        """Over how many shards a queue is to be spread."""
        return self.shards if isinstance(self.shards, int) else self.shards.get(queue, 1)

    @classmethod
    def parse(cls, transport_options: Mapping[str, Any]) -> Options:
        """The `delayed_*` entries of `transport_options`; the others are Kombu's.

        Raises OptionError that names the option, the value and what is allowed.
        """
        known = {PREFIX + each.name: each for each in fields(cls)}
        given = {name: v for name, v in transport_options.items() if name.startswith(PREFIX)}
        for name in given:
            if name not in known:
                raise OptionError(f"unknown transport option {name!r}{_suggestion(name, known)}")
        return cls(
            **{known[name].name: _checked(name, known[name], v) for name, v in given.items()}
        )


def _suggestion(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(sorted(known))}"


def _checked(name: str, option: Any, value: Any) -> Any:
    if value is None and option.default is None:
        return None
    if isinstance(option.default, bool):
        if not isinstance(value, bool):
            raise OptionError(f"transport option {name} takes True or False, not {value!r}")
        return value
    if option.type.startswith("str"):
        most = option.metadata["most"]
        if not isinstance(value, str) or not 1 <= len(value) <= most:
            raise OptionError(
                f"transport option {name} takes 1 to {most} characters, not {value!r}"
            )
        return value
    if name == PREFIX + "policies":
        return _checked_policies(name, value)
    if name == PREFIX + "shards" and isinstance(value, Mapping):
        return {
            str(queue): int(_checked_number(f"{name} of {queue!r}", option, count))
            for queue, count in value.items()
        }
    return _checked_number(name, option, value)


def _checked_number(name: str, option: Any, value: Any) -> float:
    whole = not isinstance(option.default, float)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "a whole number" if whole else "a number"
        raise OptionError(f"transport option {name} takes {kind}, not {value!r}")
    least, most = option.metadata["least"], option.metadata["most"]
    if not least <= value <= most:
        raise OptionError(f"transport option {name} takes {least:g} to {most:g}, not {value!r}")
    return value


def _checked_policies(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise OptionError(f"transport option {name} takes a dict of queues, not {value!r}")
    for queue, policies in value.items():
        if not isinstance(queue, str) or not isinstance(policies, (list, tuple)):
            raise OptionError(
                f"transport option {name} takes a list of policies for a queue, not "
                f"{policies!r} for {queue!r}"
            )
    return value
