"""The ticket of a message, with which it waits for its turn and for capacity within limits.

It is a member at the front of the message's JSON, after `due_ms` and `wait`. Its characters need no
escapes, so that scripts read it without parsing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from urllib.parse import quote, unquote

_FRONT = rb'\{(?:"due_ms": ?-?\d+, ?)?(?:"wait": ?\{[^}]*\}, ?)?'
_TICKET = re.compile(_FRONT + rb'"ticket": ?"[^"|]*\|([^"|]*)\|[^"|]*\|([^"]*)"')
_PLACE = re.compile(r"^(" + _FRONT.decode() + r')(?:"ticket": ?"[^"]*", ?)?')

#: Longer keys are replaced by a digest.
KEY_LENGTH = 100

#: Messages that are due in the same millisecond are ordered by numbers below this one.
PLACES = 4096


@dataclass(frozen=True)
class Use:
    """The `cost` of a message within a limit, for a key. With `passes` it needs no capacity."""

    limit: str
    key: str = ""
    cost: int = 1
    passes: bool = False

    @property
    def text(self) -> str:
        """The form in a ticket."""
        return f"{'!' if self.passes else ''}{slot_name(self.limit, self.key)}*{self.cost}"


@dataclass(frozen=True)
class Ticket:
    """The turn of a message: messages with the same `key` share turns, by `weight` (above 0).

    Among the messages of a key, the lowest `rank` goes first, then the earliest due time, then the
    lowest `place`. A `place` of None keeps the order of arrival.
    """

    key: str = ""
    weight: float = 1.0
    rank: int = 0
    place: int | None = None
    uses: tuple[Use, ...] = ()

    def text(self, version: str, id: str) -> str:
        """The value of the member, for the message with this id."""
        place = "" if self.place is None else str(min(max(self.place, 0), PLACES - 1))
        weight = f"{self.weight:.6f}".rstrip("0").rstrip(".")
        lane = "|".join([f"{self.rank}|{plain(self.key)}*{weight}", *(u.text for u in self.uses)])
        return f"{version}|{quote(id, safe='', errors='surrogateescape')}|{place}|{lane}"


@dataclass(frozen=True)
class LimitNumbers:
    """The capacity of a limit for each key.

    At most `slots` may be in use at once (0: any number; -1: any number, but counted). A token
    comes every `every_ms` (0: unlimited tokens), and at most `burst` are kept. A message that is
    not more than `after_ms` late needs no token. A limit that `is_global` applies across all queues
    that name it.
    """

    name: str
    slots: int = 0
    every_ms: float = 0.0
    burst: int = 1
    after_ms: int = 0
    is_global: bool = False


@dataclass(frozen=True)
class Gate:
    """The limits of a queue's gate, for messages whose tickets have this version.

    Only a queue with one shard may have a gate that `is_whole`.
    """

    version: str
    limits: tuple[LimitNumbers, ...] = ()
    is_whole: bool = True

    @cached_property
    def numbers(self) -> str:
        """The limits in the form that deliver_gated.lua takes."""
        return "".join(map(_numbers, self.limits))

    @cached_property
    def has_slots(self) -> bool:
        """Whether delivered messages may have slots of the queue, which must be released."""
        return any(each.slots and not each.is_global for each in self.limits)

    @cached_property
    def has_rates(self) -> bool:
        """Whether delivered messages may have taken tokens."""
        return any(each.every_ms for each in self.limits)

    @cached_property
    def global_limits(self) -> dict[str, str]:
        """The global limits by their names in slots, each in the form that share.lua takes."""
        found = (each for each in self.limits if each.is_global)
        return {plain(each.name): _numbers(replace(each, is_global=False)) for each in found}

    def global_slots(self, record: bytes) -> dict[str, int]:
        """The slots of global limits that a message takes, by limit and key."""
        if not self.global_limits:
            return {}
        slots = slots_in(record)
        return {name: slots[name] for name in slots if name.partition(":")[0] in self.global_limits}

    def own_slots(self, record: bytes) -> str:
        """The slots of the queue's own limits that a message takes, in the form of the server."""
        counted = {plain(each.name) for each in self.limits if each.slots and not each.is_global}
        slots = slots_in(record)
        own = (name for name in slots if name.partition(":")[0] in counted)
        return "".join(f"|{name}*{slots[name]}" for name in own)

    def has_ticket(self, record: bytes) -> bool:
        """Whether a record has a ticket of this version."""
        return self._ticket.match(record, 1) is not None

    @cached_property
    def _ticket(self) -> re.Pattern[bytes]:
        return re.compile(_FRONT + rb'"ticket": ?"' + re.escape(self.version.encode()) + rb"\|")


#: The gate of a queue that no longer has policies.
OPEN_GATE = Gate("")


def version_of(declared: Iterable[str]) -> str:
    """The version of these declarations, and of the tickets that they make."""
    return hashlib.sha1("\n".join(declared).encode()).hexdigest()[:10]


def slot_name(limit: str, key: str = "") -> str:
    """The name of the slots of a limit and a key."""
    return f"{plain(limit)}:{plain(key)}"


def lane_in(kept: bytes) -> str:
    """The lane in the record of a delayed message, or ""."""
    return _ticket_in(kept)[1]


def id_in(record: bytes) -> str:
    """The id in the ticket of a message, as it is quoted there."""
    return _ticket_in(record)[0]


def _ticket_in(record: bytes) -> tuple[str, str]:
    found = _TICKET.match(record, max(record.find(b"{"), 0))
    return (found[1].decode(), found[2].decode()) if found else ("", "")


def slots_in(record: bytes) -> dict[str, int]:
    """The costs of a message within its limits, by the names of slots."""
    uses = (use.lstrip("!").rpartition("*") for use in lane_in(record).split("|")[2:])
    return {name: int(cost) for name, _, cost in uses}


def reason_of(limit: str) -> str:
    """Why a message waits: for a limit, given as in slots, or for its turn if that is empty."""
    if not limit:
        return "waits for its turn"
    name, _, key = limit.partition(":")
    return f"waits for the limit {unquote(name)}" + (f" of {unquote(key)}" if key else "")


def put_ticket(message: str, ticket: str) -> str:
    """The text of a message with this ticket, which replaces any other."""
    return _PLACE.sub(lambda front: f'{front[1]}"ticket":"{ticket}",', message.lstrip(), count=1)


def _numbers(limit: LimitNumbers) -> str:
    numbers = limit.slots, float(limit.every_ms), limit.burst, limit.after_ms
    scope = " global" if limit.is_global else ""
    return f"{plain(limit.name)} {' '.join(map(repr, numbers))}{scope};"


def plain(key: str) -> str:
    """A name or a key in the form of slots and lanes."""
    text = quote(key, safe="", errors="backslashreplace")
    if len(text) <= KEY_LENGTH:
        return text
    return "sha1-" + hashlib.sha1(key.encode(errors="backslashreplace")).hexdigest()
