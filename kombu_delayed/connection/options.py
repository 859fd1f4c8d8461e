"""The transport's own options: their names, defaults, ranges and meanings."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kombu.utils.scheduling import CYCLE_ALIASES, cycle_by_name
from redis import SSLConnection

from ..errors import OptionError, UrlError

PREFIX = "delayed_"

#: The only value of the option `compression`.
COMPRESSION = "zstd"


def _option(default: Any, meaning: str, least: float = 0, most: float = float("inf")) -> Any:
    return field(default=default, metadata={"meaning": meaning, "least": least, "most": most})


@dataclass(frozen=True)
class Options:
    """Options that begin with `delayed_` in `broker_transport_options`."""

    lease_seconds: float = _option(
        30.0,
        "How long a consumer that stops answering keeps its unacknowledged messages before "
        "other consumers get them. A separate thread renews the lease, however long a task "
        "runs.",
        least=1,
        most=86_400,
    )
    poll_seconds: float = _option(
        5.0,
        "How often an idle consumer polls. Polling makes up for lost wake tokens and finds "
        "messages that the stock Redis transport published. The more consumers there are, "
        "the less often each polls.",
        least=0.1,
        most=60,
    )
    reconnect_seconds: float = _option(
        60.0,
        "How long a consumer tries to reconnect before Celery sees the lost connection. "
        "With failover URLs Celery sees it at once, so that it can try the next URL.",
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
        "The maximum number of due messages that one call moves to the ready lists, or about a "
        "megabyte of them. A higher number means longer pauses for the server's other clients.",
        least=1,
        most=1_000,
    )
    max_deliveries: int = _option(
        20,
        "How often a message is delivered before it becomes a dead letter. Only deliveries "
        "that ended with a lost lease or a reject with requeue count, not an orderly end. "
        "0: no limit.",
        most=1_000_000,
    )
    dead_limit: int = _option(
        100_000,
        "How many dead letters a queue keeps. Beyond that the oldest are dropped.",
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
        "About how many of the newest lifecycle events each queue keeps, of some 130 bytes "
        "each. Reports and dashboards read them. 0: no events are written.",
        most=100_000_000,
    )
    clock_skew_warning_seconds: float = _option(
        10.0,
        "A process logs a warning when it connects if its clock differs from the server's "
        "by more than this. An ETA is computed with the sender's clock and compared with "
        "the server's. 0: never.",
        most=86_400,
    )
    shards: int | Mapping[str, int] = _option(
        1,
        "The number of shards of queues: one number for all queues, or a dict with numbers "
        "by name. Each shard is a separate queue in Redis, so a Cluster can have them on "
        "several nodes. Consumers find them without the option.",
        least=1,
        most=1_000,
    )
    consumer_name: str | None = _option(
        None,
        "The name of this process in lists of consumers and in lifecycle events. Default: "
        "the name of the worker if `celery_ext` is installed, otherwise that of the host.",
        most=200,
    )
    replicas_to_wait: int = _option(
        0,
        "How many replicas must have a message before sending it returns. A failover to one"
        " of them does not lose it. If there are too few in time, `NotReplicated` is "
        "raised. 0: only the master.",
        most=100,
    )
    replica_timeout_seconds: float = _option(
        1.0,
        "How long sending waits for `delayed_replicas_to_wait`, at most 90 % of `socket_timeout`.",
        least=0.01,
        most=60,
    )
    compression: str | None = _option(
        None,
        "How large backlogs are compressed: `zstd`, which needs `kombu-delayed[zstd]` in every "
        "process that reads the queue. Workers of the stock transport cannot read such messages. "
        "Default: no compression.",
    )
    policies: Mapping[str, Sequence[Any]] | None = _option(
        None,
        "Lists of policies from `celery_ext.policies` by name of queue. Use the same in "
        "producers and workers. Default: none.",
    )
    unsafe_server: bool = _option(
        False,
        "Allow a server that may lose messages because it evicts keys when it is full.",
    )

    def shards_of(self, queue: str) -> int:
        """The number of shards of a queue."""
        return self.shards if isinstance(self.shards, int) else self.shards.get(queue, 1)

    @classmethod
    def parse(cls, transport_options: Mapping[str, Any]) -> Options:
        """The `delayed_*` entries of `transport_options`; the others are Kombu's.

        Raises OptionError with the option's name, its value and the valid values.
        """
        known = {PREFIX + each.name: each for each in fields(cls)}
        given = {name: v for name, v in transport_options.items() if name.startswith(PREFIX)}
        for name in given:
            if name not in known:
                raise unknown(name, known)
        return cls(
            **{known[name].name: _checked(name, known[name], v) for name, v in given.items()}
        )


def unknown(name: str, known: Collection[str]) -> OptionError:
    """The error for a name that is not known. It suggests the most similar one, or lists all."""
    return OptionError(f"unknown transport option {name!r}; {_hint(name, known)}")


def _hint(name: str, known: Collection[str]) -> str:
    longer = [each for each in known if each.startswith(name + "_")]
    close = longer or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"


def check_tls_options(options: Mapping[str, Any]) -> None:
    """Raise UrlError for a name that connections of redis-py do not take."""
    kinds = SSLConnection.__mro__
    known = {name for kind in kinds for name in inspect.signature(kind).parameters}
    for name in options:
        if name not in known:
            tls = sorted(each for each in known if each.startswith("ssl_"))
            raise UrlError(f"unknown TLS option {name!r}; {_hint(name, tls)}")


def check_kombu_options(transport_options: Mapping[str, Any]) -> None:
    """Raise OptionError for values that Kombu accepts unchecked and then fails with."""
    separator = transport_options.get("sep", " ")
    if not isinstance(separator, str) or not separator:
        raise OptionError(f"transport option sep takes one or more characters, not {separator!r}")
    strategy = transport_options.get("queue_order_strategy", "round_robin")
    try:
        cycle_by_name(strategy)()
    except Exception as error:  # its module may raise anything
        raise OptionError(
            f"transport option queue_order_strategy takes {', '.join(map(repr, CYCLE_ALIASES))} or "
            f"the path of a class, not {strategy!r}: {error}"
        ) from error
    steps = transport_options.get("priority_steps", [0])
    is_list = isinstance(steps, Sequence) and not isinstance(steps, str)
    if not is_list or not steps or not all(map(_is_whole, steps)):
        raise OptionError(
            f"transport option priority_steps takes a list of whole numbers, not {steps!r}"
        )
    if not isinstance(prefix := transport_options.get("global_keyprefix") or "", str):
        raise OptionError(f"transport option global_keyprefix takes text, not {prefix!r}")
    for name in _NUMBERS:
        value = transport_options.get(name)
        if value is not None and not (_is_number(value) and value >= 0):
            raise OptionError(f"transport option {name} takes a number from 0, not {value!r}")


#: Kombu's options that are often read from the environment, and are text then.
_NUMBERS = ("socket_timeout", "socket_connect_timeout", "max_connections", "health_check_interval")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(name: str, option: Any, value: Any) -> Any:
    if value is None and option.default is None:
        return None
    if isinstance(option.default, bool):
        if not isinstance(value, bool):
            raise OptionError(f"transport option {name} takes True or False, not {value!r}")
        return value
    if name == PREFIX + "compression":
        if value != COMPRESSION:
            raise OptionError(f"transport option {name} takes {COMPRESSION!r}, not {value!r}")
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
    if not option.metadata["least"] <= value <= option.metadata["most"]:
        raise OptionError(f"transport option {name} takes {span(option)}, not {value!r}")
    return value


def span(option: Any) -> str:
    """The range of an option that is a number, such as `1 to 1000000`."""
    return f"{option.metadata['least']:.15g} to {option.metadata['most']:.15g}"


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
