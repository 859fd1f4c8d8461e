"""What a message needs to know to wait for its turn and for room within limits: its ticket.

It is a member in front of the message's JSON, behind `due_ms` and `wait`, of characters that need
no escapes: scripts read it without parsing.
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

#: Longer keys are known by a digest.
KEY_LENGTH = 100

#: Messages that are due in one millisecond are ordered by numbers below this one.
PLACES = 4096


@dataclass(frozen=True)
class Use:
    """Room that a message takes within a limit: of a key, and how much. `passes`: it needs none."""

    limit: str
    key: str = ""
    cost: int = 1
    passes: bool = False

    @property
    def text(self) -> str:
        """As a ticket has it."""
        return f"{'!' if self.passes else ''}{slot_name(self.limit, self.key)}*{self.cost}"


@dataclass(frozen=True)
class Ticket:
    """Whose turn it is with: messages with one `key` share turns, by `weight` (above 0).

    Of the messages of a key those of the lowest `rank` go first, then who is due first, then those
    with the lowest `place`; None: as they came.
    """

    key: str = ""
    weight: float = 1.0
    rank: int = 0
    place: int | None = None
    uses: tuple[Use, ...] = ()

    def text(self, version: str, id: str) -> str:
        """The member's value, for the message with an id."""
        place = "" if self.place is None else str(min(max(self.place, 0), PLACES - 1))
        weight = f"{self.weight:.6f}".rstrip("0").rstrip(".")
        lane = "|".join([f"{self.rank}|{plain(self.key)}*{weight}", *(u.text for u in self.uses)])
        return f"{version}|{quote(id, safe='', errors='surrogateescape')}|{place}|{lane}"


@dataclass(frozen=True)
class LimitNumbers:
    """How much there is of a limit for each key.

    `slots` may be in use at once (0: any number; -1: any number, and they are counted). A token
    comes every `every_ms` (0: without end), and at most `burst` are kept. What is not late by more
    than `after_ms` needs no token. A limit that `is_global` holds over all queues that name it.
    """

    name: str
    slots: int = 0
    every_ms: float = 0.0
    burst: int = 1
    after_ms: int = 0
    is_global: bool = False


@dataclass(frozen=True)
class Gate:
    """By what the messages of a queue leave it, for those whose tickets have this version.

    Only a queue with one shard may have one that `is_whole`.
    """

    version: str
    limits: tuple[LimitNumbers, ...] = ()
    is_whole: bool = True

    @cached_property
    def numbers(self) -> str:
        """Its limits as deliver_gated.lua takes them."""
        return "".join(map(_numbers, self.limits))

    @cached_property
    def has_slots(self) -> bool:
        """Whether messages that are handed out may have slots of its queue to be given back."""
        return any(each.slots and not each.is_global for each in self.limits)

    @cached_property
    def has_rates(self) -> bool:
        """Whether messages that are handed out may have taken tokens."""
        return any(each.every_ms for each in self.limits)

    @cached_property
    def global_limits(self) -> dict[str, str]:
        """Global limits by their names in slots, each as share.lua takes it."""
        found = (each for each in self.limits if each.is_global)
        return {plain(each.name): _numbers(replace(each, is_global=False)) for each in found}

    def global_slots(self, record: bytes) -> dict[str, int]:
        """The slots of global limits that a message takes, by limit and key."""
        if not self.global_limits:
            return {}
        slots = slots_in(record)
        return {name: slots[name] for name in slots if name.partition(":")[0] in self.global_limits}

    def own_slots(self, record: bytes) -> str:
        """The slots of limits of its queue that a message takes, as the server has them."""
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


#: For a queue that has no policies any more.
OPEN_GATE = Gate("")


def version_of(declared: Iterable[str]) -> str:
    """What tickets are valid for that were made by the same declarations."""
    return hashlib.sha1("\n".join(declared).encode()).hexdigest()[:10]


def slot_name(limit: str, key: str = "") -> str:
    """What slots of a limit and a key are called."""
    return f"{plain(limit)}:{plain(key)}"


def lane_in(kept: bytes) -> str:
    """What a delayed message's record has in common with those that it waits in line with."""
    return _ticket_in(kept)[1]


def id_in(record: bytes) -> str:
    """The id of a message with a ticket, as that has it."""
    return _ticket_in(record)[0]


def _ticket_in(record: bytes) -> tuple[str, str]:
    found = _TICKET.match(record, max(record.find(b"{"), 0))
    return (found[1].decode(), found[2].decode()) if found else ("", "")


def slots_in(record: bytes) -> dict[str, int]:
    """What a message with such a record takes of limits, as slots are called."""
    uses = (use.lstrip("!").rpartition("*") for use in lane_in(record).split("|")[2:])
    return {name: int(cost) for name, _, cost in uses}


def reason_of(limit: str) -> str:
    """Why what waits for a limit, as slots name it, does not run; empty: it waits for its turn."""
    if not limit:
        return "waits for its turn"
    name, _, key = limit.partition(":")
    return f"waits for the limit {unquote(name)}" + (f" of {unquote(key)}" if key else "")


def put_ticket(message: str, ticket: str) -> str:
    """The text of a message with this ticket instead of any other."""
    return _PLACE.sub(lambda front: f'{front[1]}"ticket":"{ticket}",', message.lstrip(), count=1)


def _numbers(limit: LimitNumbers) -> str:
    numbers = limit.slots, float(limit.every_ms), limit.burst, limit.after_ms
    scope = " global" if limit.is_global else ""
    return f"{plain(limit.name)} {' '.join(map(repr, numbers))}{scope};"


def plain(key: str) -> str:
    """A name or a key as slots and lanes have it."""
    text = quote(key, safe="", errors="backslashreplace")
    if len(text) <= KEY_LENGTH:
        return text
    return "sha1-" + hashlib.sha1(key.encode(errors="backslashreplace")).hexdigest()
