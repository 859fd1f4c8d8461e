"""The envelope around a message: its due time, its stored form, and reading a delivery."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from dateutil.parser import isoparse
from kombu.exceptions import DecodeError
from kombu.utils.json import JSONEncoder, loads

from ..connection.native import get_logger
from ..errors import MessageError, OptionError
from .wait import NO_WAIT, Wait

logger = get_logger(__name__)

#: The maximum delay, nine thousand years: no clock here overflows when it adds that.
LONGEST_DELAY_MS = 9_000 * 366 * 86_400_000

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

#: Kombu's error about a message may quote all of it, so reasons are truncated.
REASON_LENGTH = 500

#: Prefix of the reason of a dead letter whose body its program could not decode.
UNREADABLE_BODY = "its body cannot be decoded"

#: The member that deliver.lua writes in front, even if the message already has one.
_PROMOTED = re.compile(rb'\{"due_ms":(-?\d{1,18}),')

#: A value of the hash of delayed messages: priority step, due time, JSON.
_KEPT = re.compile(rb"(.)(\d+)(.*)", re.DOTALL)

Payload = dict[str, Any]

#: A message as Kombu's Redis transport writes it.
to_json = JSONEncoder().encode


@dataclass(frozen=True)
class Due:
    """When a message is due: `at_ms` since the epoch, or `delay_ms` from the server's now."""

    at_ms: int | None = None
    delay_ms: int | None = None

    @property
    def argument(self) -> str:
        """The form that schedule.lua reads."""
        return f"+{self.delay_ms}" if self.at_ms is None else str(self.at_ms)


def due(message: Payload) -> Due | None:
    """When a message is due by its headers `eta` (ISO 8601, naive means UTC) or `x-delay` (ms).

    None means at once. A header that cannot be read counts as absent, with a warning: Celery itself
    handles a bad ETA, and nothing is lost. Celery copies the headers of a task to its retries, so
    `x-delay` counts for the first attempt only.
    """
    headers = message.get("headers") or {}
    eta, delay = headers.get("eta"), headers.get("x-delay")
    try:
        if eta is not None:
            return Due(at_ms=eta_to_ms(eta))
        if delay is not None and not ("task" in headers and headers.get("retries")):
            return Due(delay_ms=_to_delay_ms(delay))
    except (ValueError, TypeError, OverflowError) as error:
        logger.warning(
            "Message %s is published without a delay: header %s cannot be read (%s)",
            message_id(message),
            f"eta={eta!r}"[:200] if eta is not None else f"x-delay={delay!r}"[:200],
            error,
        )
    return None


class Unique(NamedTuple):
    """The unique key of a delayed message in its queue, and what happens to a second message."""

    key: str
    conflict: str
    #: Whether the message keeps the key until its task has ended, not only while it is delayed.
    until_end: bool = False
    #: Whether it replaces a running task, whose id it has: it is not that task, sent again.
    replaces: bool = False


#: The header for `until_end`, and its value.
UNTIL_HEADER, FINISHED = "delayed_until", "finished"

CONFLICTS = ("refuse", "replace", "debounce")


def unique_key(message: Payload) -> Unique | None:
    """The headers `delayed_unique` and `delayed_conflict`; None if the message is not unique.

    A retry has the headers of its first attempt, but does not conflict with others: "retry". Raises
    OptionError for an invalid header.
    """
    headers = message.get("headers") or {}
    key = headers.get("delayed_unique")
    if key is None:
        return None
    until = headers.get(UNTIL_HEADER)
    if until not in (None, FINISHED):
        raise OptionError(f"header {UNTIL_HEADER} takes {FINISHED!r}, not {until!r}")
    if until and not headers.get("id"):
        raise OptionError(f"header {UNTIL_HEADER} is for tasks: this message has no task id")
    if headers.get("retries"):
        return Unique(str(key), "retry", bool(until))
    conflict = headers.get("delayed_conflict", CONFLICTS[0])
    if conflict not in CONFLICTS:
        raise OptionError(
            f"header delayed_conflict takes one of {', '.join(CONFLICTS)}, not {conflict!r}"
        )
    replaces = bool(headers.get("replaced_task_nesting"))
    return Unique(str(key), conflict, bool(until), replaces)


def eta_to_ms(eta: str | datetime) -> int:
    """Milliseconds since the epoch, rounded up so that no message is early.

    Raises ValueError if `eta` is not a time, TypeError if it is not even text.
    """
    moment = eta if isinstance(eta, datetime) else parse_iso8601(eta)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    since = moment - EPOCH
    return -(
        -(since.days * 86_400_000_000 + since.seconds * 1_000_000 + since.microseconds) // 1000
    )


def parse_iso8601(text: str) -> datetime:
    """Parse ISO 8601 with the fast parser, or with the slower, complete one if that fails."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        pass
    try:
        return isoparse(text)
    except OverflowError:  # midnight after the last possible day, which would crash Celery
        return datetime.max


def _to_delay_ms(delay: Any) -> int:
    number = float(delay)
    if isinstance(delay, bool) or not math.isfinite(number):
        raise ValueError("a number of milliseconds is needed")
    return min(max(math.ceil(number), 0), LONGEST_DELAY_MS)


def message_id(message: Payload) -> str:
    """The task id, or the id of a message that is not a task, as text that Redis accepts."""
    properties = message.get("properties") or {}
    id = str(
        (message.get("headers") or {}).get("id")
        or properties.get("message_id")
        or properties.get("delivery_tag")
    )
    return id if id.isascii() else escaped(id)


def escaped(text: str) -> str:
    """Text as Redis accepts it: a half of a surrogate pair, as in a cut emoji, is escaped."""
    return text.encode(errors="backslashreplace").decode()


class PromotedHeaders(dict[str, Any]):
    """Headers of a message that has waited in the backlog.

    `due_ms` is when the message was due, which policies may have moved; a copy has none.
    """

    due_ms: int | None = None
    #: When a recent pause of the queue ended: lateness counts from then.
    resumed_ms: int = 0

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)


class WaitedHeaders(PromotedHeaders):
    """Headers of a message that has waited for its ETA: `get("eta")` is None.

    Celery's task strategy calls `headers.get("eta")` to decide whether to put the task into its
    timer and raise the prefetch count, which is not needed here. The item stays, so that
    `task.request.eta` shows it.
    """

    def get(self, key: str, default: Any = None) -> Any:
        """`dict.get`, except for `eta`."""
        return default if key == "eta" else dict.get(self, key, default)

    def copy(self) -> WaitedHeaders:
        """A copy that hides the ETA as well."""
        return WaitedHeaders(self)


def hide_eta(payload: Payload, due_ms: int) -> None:
    """Hide the ETA of a message that is already due from Celery's timer."""
    headers = payload["headers"]
    kind = PromotedHeaders if headers.get("eta") is None else WaitedHeaders
    payload["headers"] = headers = kind(headers)
    headers.due_ms = due_ms


@dataclass(frozen=True)
class Envelope:
    """A delivered message: the payload for Kombu, and the facts that the transport knows.

    `due_ms` is None for a message that was never delayed; `deliveries` counts earlier attempts.
    `wait` is what policies have done with it so far.
    """

    id: str
    payload: Payload
    due_ms: int | None
    deliveries: int
    wait: Wait = NO_WAIT

    @property
    def first_due_ms(self) -> int | None:
        """The due time requested by the sender, before any policy moved it; None if unknown."""
        return self.due_ms if self.wait.first_due_ms is None else self.wait.first_due_ms


def check_task(payload: Payload) -> None:
    """Raise MessageError for what would crash a Celery worker, except for the content of a body."""
    _check_fields(payload["headers"])
    body = payload.get("body")
    if not isinstance(body, Sized):
        raise MessageError(f"the message has {'no body' if body is None else f'the body {body!r}'}")


def check_body(headers: Mapping[str, Any], body: Any) -> None:
    """Raise DecodeError, which Celery expects, for a decoded body that would crash its worker."""
    try:
        if isinstance(body, dict):  # a task of protocol 1 has its fields in the body
            _check_fields({**body, **headers})
        if headers.get("task") is not None:
            is_task = "args" in body if isinstance(body, dict) else _has_length(body, 3)
            if not is_task:
                raise MessageError("it is not the body of a task")
    except MessageError as error:
        raise DecodeError(str(error)) from error


def _check_fields(given: Mapping[str, Any]) -> None:
    """Raise MessageError for the fields of a task that would crash a Celery worker."""
    task, id = given.get("task"), given.get("id")
    if isinstance(task, (list, dict)):
        raise MessageError(f"the header task is not a name but {task!r}"[:REASON_LENGTH])
    if task is not None and (id is None or isinstance(id, (list, dict))):
        has = "no header id" if id is None else f"the header id {id!r}"
        raise MessageError(f"the task {task!r} has {has}"[:REASON_LENGTH])
    for name, is_valid in _CHECKS.items():
        if (value := given.get(name)) is not None and not is_valid(value):
            raise MessageError(f"the task {task!r} has the header {name} {value!r}"[:REASON_LENGTH])


def _are_limits(given: Any) -> bool:
    if not given:
        return True
    if not _has_length(given, 2):
        return False
    try:
        return not any(math.isnan(float(each or 0)) for each in given)
    except (TypeError, ValueError, OverflowError):
        return False


def _are_names(given: Any) -> bool:
    return not given or (isinstance(given, list) and all(isinstance(each, str) for each in given))


#: Celery rejects any other time that it cannot read, but takes an empty one for a time.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "timelimit": _are_limits,
    "stamped_headers": _are_names,
    "eta": bool,
    "expires": bool,
    "shadow": lambda given: not isinstance(given, (list, dict)),
}


def _has_length(given: Any, length: int) -> bool:
    return isinstance(given, (list, tuple)) and len(given) == length


def open_envelope(text: bytes, tag: int) -> Envelope:
    """Read a message from a ready list and give it the delivery tag of this delivery.

    Raises MessageError if it is not a message of Kombu.
    """
    payload = _decode(text)
    due_ms = _whole_number(payload.pop("due_ms")) if "due_ms" in payload else None
    if due_ms is None and (promoted := _PROMOTED.match(text)):
        due_ms = int(promoted[1])
    deliveries = _whole_number(payload.pop("deliveries")) if "deliveries" in payload else None
    wait = Wait.of(payload.pop("wait")) if "wait" in payload else NO_WAIT
    payload.pop("ticket", None)
    properties, headers = payload["properties"], payload["headers"]
    id = message_id(payload)
    properties["delivery_tag"] = tag
    if deliveries is not None:
        headers["redelivered"] = properties["delivery_info"]["redelivered"] = True
    if due_ms is not None:
        hide_eta(payload, due_ms)
    return Envelope(id, payload, due_ms, deliveries or 0, wait)


def _whole_number(value: Any) -> int | None:
    """A value that the scripts wrote; None for anything that others wrote in its place."""
    return value if type(value) is int else None


class Kept(NamedTuple):
    """A message as stored in the backlog."""

    step: int
    due_ms: int
    message: bytes


def open_kept(record: bytes) -> Kept:
    """Read a value of the hash of delayed messages. Raises MessageError if it is not one."""
    brace = record.find(b"{")
    if brace > 1 and (due_ms := record[1:brace]).isdigit():  # nearly always
        return Kept(record[0] - 48, int(due_ms), record[brace:])
    parts = _KEPT.fullmatch(record)
    if parts is None:
        raise MessageError("it is not a delayed message: step, due time and JSON are needed")
    step, due_ms, message = parts.groups()
    return Kept(step[0] - 48, int(due_ms), message)


def _decode(text: bytes) -> Payload:
    try:
        payload = loads(text)
    except Exception as error:  # Kombu's JSON rebuilds Python objects, which may fail in any way
        raise MessageError(f"the message is not JSON: {error}"[:REASON_LENGTH]) from error
    if not isinstance(payload, dict):
        raise MessageError(f"the message is not a JSON object but {type(payload).__name__}")
    if not isinstance(payload.get("properties"), dict):
        raise MessageError("the message has no properties")
    if not isinstance(payload["properties"].setdefault("delivery_info", {}), dict):
        raise MessageError("the message's delivery_info is not an object")
    if payload.get("headers") is None:
        payload["headers"] = {}
    if not isinstance(payload["headers"], dict):
        raise MessageError("the message's headers are not an object")
    return payload


def step_char(step: int) -> str:
    """A priority step as the one character in front of a stored message."""
    return chr(48 + step)


class Entry(NamedTuple):
    """One message on its way into a queue.

    `due` is milliseconds since the epoch, or `+` and milliseconds from the server's now.
    """

    id: str
    step: int
    message: str
    due: str = ""

    @property
    def record(self) -> str:
        """The stored form of the message outside of the backlog."""
        return step_char(self.step) + self.message

    @property
    def front(self) -> str:
        """The front of the record in the backlog: the step, and the due time if it is known."""
        return step_char(self.step) + ("" if self.due.startswith("+") else self.due)
