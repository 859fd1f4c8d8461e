"""The envelope around a message: when it is due, how it is stored, what comes back."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from dateutil.parser import isoparse
from kombu.utils.json import JSONEncoder, loads

from ..connection.native import get_logger
from ..errors import MessageError, OptionError
from .wait import NO_WAIT, Wait

logger = get_logger(__name__)

#: A delay counts as this one at the most: nine thousand years, which every clock here can add.
LONGEST_DELAY_MS = 9_000 * 366 * 86_400_000

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

#: Kombu's complaint about a message may quote all of it.
REASON_LENGTH = 500

#: How the reason of a dead letter begins whose body its program could not decode.
UNREADABLE_BODY = "its body cannot be decoded"

#: What deliver.lua writes in front, also of a message that has such a member of its own.
_PROMOTED = re.compile(rb'\{"due_ms":(-?\d{1,18}),')

#: In the hash of delayed messages: priority step, due time, JSON.
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

    None: at once. A header that cannot be read counts as absent, with a warning: Celery's own
    handling answers a bad ETA, and nothing is lost. The retry of a task has the `x-delay` of its
    first attempt, as Celery copies headers: it counts for that one only.
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
    """The key that no two delayed messages of a queue share, and what becomes of a second one."""

    key: str
    conflict: str
    #: Whether it has the key until its task has ended, and not only while it is delayed.
    until_end: bool = False


#: The header that says so, and its value.
UNTIL_HEADER, FINISHED = "delayed_until", "finished"

CONFLICTS = ("refuse", "replace", "debounce")


def unique_key(message: Payload) -> Unique | None:
    """The headers `delayed_unique` and `delayed_conflict`; None: the message is no such one.

    A retry has the headers of its first attempt and is not held against others: "retry". Raises
    OptionError for an unknown conflict.
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
    return Unique(str(key), conflict, bool(until))


def eta_to_ms(eta: str | datetime) -> int:
    """Milliseconds since the epoch, rounded up so that nothing is ever early.

    Raises ValueError where `eta` is not a time, TypeError where it is not even text.
    """
    moment = eta if isinstance(eta, datetime) else parse_iso8601(eta)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    since = moment - EPOCH
    return -(
        -(since.days * 86_400_000_000 + since.seconds * 1_000_000 + since.microseconds) // 1000
    )


def parse_iso8601(text: str) -> datetime:
    """Read ISO 8601: the fast way where it can, the slower full one where it cannot."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        pass
    try:
        return isoparse(text)
    except OverflowError:  # the midnight after the last day there is; Celery would not survive it
        return datetime.max


def _to_delay_ms(delay: Any) -> int:
    number = float(delay)
    if isinstance(delay, bool) or not math.isfinite(number):
        raise ValueError("a number of milliseconds is needed")
    return min(max(math.ceil(number), 0), LONGEST_DELAY_MS)


def message_id(message: Payload) -> str:
    """The task id, or what identifies a message that is not a task, as text that Redis takes."""
    properties = message.get("properties") or {}
    id = str(
        (message.get("headers") or {}).get("id")
        or properties.get("message_id")
        or properties.get("delivery_tag")
    )
    return id.encode(errors="backslashreplace").decode()


class WaitedHeaders(dict[str, Any]):
    """Headers of a message that has waited in the backlog: `get("eta")` is None.

    Celery's task strategy asks `headers.get("eta")` whether to put the task into its timer and to
    raise the prefetch count; it need not. The item stays, so that `task.request.eta` shows it.
    `due_ms` is when the message was due, which policies may have moved; a copy has none.
    """

    due_ms: int | None = None
    #: Since when its queue goes on, where that was paused lately: it is late from then on.
    resumed_ms: int = 0

    def get(self, key: str, default: Any = None) -> Any:
        """As of any dict, but for `eta`."""
        return default if key == "eta" else super().get(key, default)

    def copy(self) -> WaitedHeaders:
        """A copy that hides the ETA as well."""
        return WaitedHeaders(self)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)


def hide_eta(payload: Payload, due_ms: int) -> None:
    """Keep Celery's timer from what is due already."""
    payload["headers"] = headers = WaitedHeaders(payload["headers"])
    headers.due_ms = due_ms


@dataclass(frozen=True)
class Envelope:
    """A delivered message: what Kombu gets, and what the transport knows of it.

    `due_ms` is None for a message that was never delayed; `deliveries` counts earlier attempts.
    `wait` is what policies have made of it so far.
    """

    id: str
    payload: Payload
    due_ms: int | None
    deliveries: int
    wait: Wait = NO_WAIT

    @property
    def first_due_ms(self) -> int | None:
        """When it was due by who sent it, whatever policies have made of that; None: unknown."""
        return self.due_ms if self.wait.first_due_ms is None else self.wait.first_due_ms


def check_task(payload: Payload) -> None:
    """Raises MessageError for what would end a Celery worker: no body, no id, no proper name."""
    headers = payload["headers"]
    task = headers.get("task")
    if isinstance(task, (list, dict)):
        raise MessageError(f"the header task is not a name but {task!r}"[:REASON_LENGTH])
    id = headers.get("id")
    if task is not None and (id is None or isinstance(id, (list, dict))):
        has = "no header id" if id is None else f"the header id {id!r}"
        raise MessageError(f"the task {task!r} has {has}"[:REASON_LENGTH])
    if payload.get("body") is None:
        raise MessageError("the message has no body")


def open_envelope(text: bytes, tag: int) -> Envelope:
    """Read a message from a ready list and give it the delivery tag of this delivery.

    Raises MessageError where it is not a message of Kombu's.
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
    """What the scripts have written; what others wrote in its place counts for nothing."""
    return value if type(value) is int else None


class Kept(NamedTuple):
    """A message as the backlog keeps it."""

    step: int
    due_ms: int
    message: bytes


def open_kept(record: bytes) -> Kept:
    """Read a value of the hash of delayed messages. Raises MessageError where it is none."""
    brace = record.find(b"{")
    if brace > 1 and (due_ms := record[1:brace]).isdigit():  # as good as always
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
    """A priority step as the one character that stands in front of a stored message."""
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
        """The form in which Redis keeps it, but in the backlog."""
        return step_char(self.step) + self.message

    @property
    def front(self) -> str:
        """What is in front of it in the backlog, as far as its due time is known."""
        return step_char(self.step) + ("" if self.due.startswith("+") else self.due)
