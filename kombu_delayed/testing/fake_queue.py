"""One queue of the fake store: where each message is, in Python's own types.

What is here does the work of `lua/include`, and is to be changed with it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..message import Kept
from ..store import DeadLetter, Limits
from ..waits import Wait

_DUE_MS = re.compile(rb'\{"due_ms":(\d+)')
_DELIVERIES = re.compile(rb', ?"deliveries": ?(\d+)\}$')
_SENDER = [
    re.compile(rb'"%b": ?"[^"]*"' % name) for name in (b"delivery_tag", b"origin", b"reply_to")
]
_DUPLICATE = re.compile(r"^(.*)\x1f\d+$", re.DOTALL)

#: What others wrote as a count may be of any length.
MOST_DELIVERIES = 10**9

KEYS_AT_A_TIME = 10

Buries = Callable[[bytes, int], bool]


def id_of_member(member: str) -> str:
    """The id that a member of the backlog, or a name among the dead, stands for."""
    found = _DUPLICATE.match(member)
    return found[1] if found else member


def in_bytes(name: str) -> bytes:
    """The order in which Redis has names of one score."""
    return name.encode(errors="surrogateescape")


def deliveries_of(message: bytes) -> int:
    """How often a message was delivered before."""
    found = _DELIVERIES.search(message)
    return min(int(found[1]), MOST_DELIVERIES) if found else 0


def without_deliveries(message: bytes) -> bytes:
    """A message that counts anew."""
    return _DELIVERIES.sub(b"}", message)


def with_deliveries(message: bytes, count: int) -> bytes:
    """A message on its way back from a consumer."""
    text = message.rstrip()
    if not text.endswith(b"}"):
        return message
    return without_deliveries(text)[:-1] + b',"deliveries":%d}' % count


def with_due_ms(message: bytes, due_ms: int) -> bytes:
    """A message on its way out of the backlog."""
    return b'{"due_ms":%d,' % due_ms + message[1:]


def put_wait_into(message: bytes, wait: Wait) -> bytes:
    """A message with what it waits for."""
    text = message.decode(errors="surrogateescape")
    return wait.put_into(text).encode(errors="surrogateescape")


def message_id_of(message: bytes) -> str:
    """What a poison message is buried under."""
    try:
        content = json.loads(message.decode(errors="surrogateescape"))
    except ValueError:
        content = None
    if isinstance(content, dict):
        headers, properties = (_members(content.get(name)) for name in ("headers", "properties"))
        ids = headers.get("id"), properties.get("message_id"), properties.get("delivery_tag")
        for id in ids:
            if id and isinstance(id, str):
                return id
            if id and isinstance(id, (int, float)) and not isinstance(id, bool):
                return f"{id:.14g}"
    return hashlib.sha1(message).hexdigest()


def _members(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@dataclass
class FakeQueue:
    """The messages of one queue by state, its consumers' leases and its wake tokens."""

    steps: tuple[int, ...]
    delayed: dict[str, Kept] = field(default_factory=dict)
    #: Member -> step and due time, of what is more urgent than the least urgent step.
    urgent: dict[str, tuple[int, int]] = field(default_factory=dict)
    least: int = 0
    duplicates: dict[str, int] = field(default_factory=dict)
    unique: dict[str, str] = field(default_factory=dict)
    unique_due: dict[str, int] = field(default_factory=dict)
    latest: dict[str, int] = field(default_factory=dict)
    ready: dict[int, deque[bytes]] = field(default_factory=dict)
    unacked: dict[str, dict[int, bytes]] = field(default_factory=dict)
    dead: dict[str, tuple[int, DeadLetter]] = field(default_factory=dict)
    consumers: dict[str, int] = field(default_factory=dict)
    wake: dict[str, int] = field(default_factory=dict)
    armed: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        self.ready = {step: deque() for step in self.steps}

    # Ready.

    def list_for(self, step: int) -> deque[bytes]:
        """The ready list of a priority step, the next message in front."""
        return self.ready[max((s for s in self.steps if s <= step), default=self.steps[0])]

    @property
    def any_ready(self) -> bool:
        """Whether something is ready."""
        return any(self.ready.values())

    @property
    def ready_due_ms(self) -> list[int]:
        """When the delayed ones were due of those in front of the ready lists."""
        heads = (_DUE_MS.match(waiting[0]) for waiting in self.ready.values() if waiting)
        return [int(found[1]) for found in heads if found]

    def announce_ready(self) -> None:
        """Put the token `now`."""
        self.wake["now"] = 0

    # The backlog.

    def in_order(self) -> list[tuple[str, Kept]]:
        """Members and messages by due time."""
        return sorted(self.delayed.items(), key=lambda item: (item[1].due_ms, in_bytes(item[0])))

    @property
    def earliest(self) -> int | None:
        """The first due time."""
        return min((kept.due_ms for kept in self.delayed.values()), default=None)

    def members_of(self, id: str) -> list[str]:
        """The members that an id stands for, whether they are delayed or not."""
        return [id, *(f"{id}\x1f{n}" for n in range(2, self.duplicates.get(id, 1) + 1))]

    def put(self, id: str, kept: Kept, may_repeat: bool = False) -> str | None:
        """Keep a message until it is due, as a member; None where the very same waits already."""
        kept = kept._replace(message=kept.message.lstrip())
        highest = self.duplicates.get(id, 1)
        members = self.members_of(id)
        if highest > 1 or id in self.delayed:
            waiting = [self.delayed[member] for member in members if member in self.delayed]
            if not may_repeat and any(is_same(each, kept) for each in waiting):
                return None
        free = [n for n, member in enumerate(members, 1) if member not in self.delayed]
        number = free[0] if free else highest + 1
        while (member := f"{id}\x1f{number}" if number > 1 else id) in self.delayed:
            number += 1
        if number > highest:
            self.duplicates[id] = number
        self.keep(member, kept)
        return member

    def keep(self, member: str, kept: Kept) -> None:
        """Keep a message under its name in the backlog."""
        self.delayed[member] = kept
        if kept.step > self.least:
            self.least = kept.step
        elif kept.step < self.least:
            self.urgent[member] = kept.step, kept.due_ms

    def forget_urgent(self) -> None:
        """The backlog is empty."""
        self.urgent.clear()
        self.least = 0

    def take(self, member: str) -> Kept | None:
        """Take a message out of the backlog."""
        kept = self.delayed.pop(member, None)
        if kept is not None and (duplicate := _DUPLICATE.match(member)):
            id = duplicate[1]
            if not any(other in self.delayed for other in self.members_of(id)[1:]):
                self.duplicates.pop(id, None)
        return kept

    def promote(self, now_ms: int, limit: int) -> bool:
        """Make ready what is due; returns whether more is."""
        is_mixed = bool(self.urgent)
        due = [member for member, kept in self.in_order() if kept.due_ms <= now_ms]
        first = due[: (limit + 1) // 2 if is_mixed else limit]
        for member in first:
            self._make_ready(member)
            self.urgent.pop(member, None)
        if not self.delayed:
            self.forget_urgent()
        elif is_mixed and first:
            self._promote_urgent(now_ms, limit)
        return any(kept.due_ms <= now_ms for kept in self.delayed.values())

    def _make_ready(self, member: str) -> None:
        kept = self.delayed[member]
        self.list_for(kept.step).append(with_due_ms(kept.message, kept.due_ms))
        self.take(member)

    def _promote_urgent(self, now_ms: int, limit: int) -> None:
        due = [(*place, in_bytes(name), name) for name, place in self.urgent.items()]
        for _, due_ms, _, member in sorted(each for each in due if each[1] <= now_ms)[:limit]:
            del self.urgent[member]
            if member in self.delayed and self.delayed[member].due_ms == due_ms:
                self._make_ready(member)

    def forget_past_keys(self, now_ms: int) -> None:
        """Forget keys of unique messages that have left the backlog, some at a time."""
        past = [key for key, at_ms in self.unique_due.items() if at_ms <= now_ms]
        in_order = sorted(past, key=lambda key: (self.unique_due[key], in_bytes(key)))
        for key in in_order[:KEYS_AT_A_TIME]:
            kept = self.delayed.get(self.unique[key])
            if kept is None:
                self.forget_key(key)
            else:
                self.unique_due[key] = kept.due_ms

    def forget_key(self, key: str) -> None:
        """No unique message with this key is delayed."""
        self.unique.pop(key, None)
        self.unique_due.pop(key, None)

    def announce_due(self, due_ms: int | None, earliest_before: int | None = None) -> None:
        """Put the token `due`, unless who knows of the earliest due time comes early enough."""
        if due_ms is not None and (earliest_before is None or due_ms < earliest_before):
            self.wake["due"] = min(due_ms, self.wake.get("due", due_ms))

    def announce_all(self) -> None:
        """Put tokens for all that can be claimed."""
        if self.any_ready:
            self.announce_ready()
        self.announce_due(self.earliest)

    def disarm(self, consumer: str) -> None:
        """Forget the promise of a consumer."""
        if self.armed and self.armed[1] == consumer:
            self.armed = None

    # Unacked.

    def held(self, consumer: str) -> dict[int, bytes]:
        """What a consumer holds, by tag."""
        return self.unacked.setdefault(consumer, {})

    def give_back(
        self,
        consumer: str,
        tags: Iterable[int],
        count: int,
        buries: Buries | None = None,
        behind: bool = False,
    ) -> int:
        """Put held messages back to the heads of their lists, or behind what waits, as given.

        Returns how many there were.
        """
        held, returned, is_ready = self.held(consumer), 0, False
        for tag in tags if behind else sorted(tags, reverse=True):
            record = held.pop(tag, None)
            if record is None:
                continue
            returned += 1
            deliveries = deliveries_of(record) + count
            if buries is None or not buries(record, deliveries):
                message = with_deliveries(record[1:], deliveries)
                ready = self.list_for(record[0] - 48)
                (ready.append if behind else ready.appendleft)(message)
                is_ready = True
        if is_ready:
            self.announce_ready()
        return returned

    # Dead.

    @property
    def dead_in_order(self) -> list[str]:
        """The names of the dead letters, the oldest first."""
        return sorted(self.dead, key=lambda name: (self.dead[name][1].at_ms, in_bytes(name)))

    def entomb(self, letter: DeadLetter, step: int, limits: Limits) -> None:
        """Keep a dead letter under its id or a free name, within the limits."""
        name, n = letter.id, max(len(self.dead), 1)
        while name in self.dead:
            n += 1
            name = f"{letter.id}\x1f{n}"
        self.dead[name] = step, replace(letter, id=name)
        oldest_ms = letter.at_ms - int(limits.dead_seconds * 1000)
        aged = [each for each in self.dead_in_order if self.dead[each][1].at_ms <= oldest_ms]
        for each in aged:
            del self.dead[each]
        for each in self.dead_in_order[: max(len(self.dead) - limits.dead_limit, 0)]:
            del self.dead[each]


def is_same(one: Kept, other: Kept) -> bool:
    """Whether two messages are one that was sent twice."""
    return one.step == other.step and _without_sender(one) == _without_sender(other)


def _without_sender(kept: Kept) -> bytes:
    message = kept.message
    for pattern in _SENDER:
        message = pattern.sub(b"", message, count=1)
    return message
