"""A queue as plain data: read it whole, or put messages into any state."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from copy import copy
from itertools import chain
from typing import Any, TypedDict

from ..inspection.backlog import Backlog
from ..message.envelope import Kept, step_char
from ..store.store import Entry, Store
from .keyspace import raw, read_key, text, write_key

#: How long a consumer counts as alive if no lease is given.
LEASE_MS = 30_000


class QueueState(TypedDict):
    """A queue's messages by state, its consumers with the ends of their leases, its wake tokens.

    Messages are mappings with these members; for `seed`, `step` is optional:

    - delayed: id, due_ms, step, message
    - ready: step, message; the next to leave first within a step
    - unacked: consumer, tag, step, message
    - dead: id, reason, consumer, at_ms, deliveries, step, message

    `armed` is "due_ms consumer" for the consumer that will claim at the next due time, or empty.
    `unique` maps keys of unique messages to the ids with which they were scheduled.
    """

    delayed: list[dict[str, Any]]
    ready: list[dict[str, Any]]
    unacked: list[dict[str, Any]]
    dead: list[dict[str, Any]]
    consumers: dict[str, int]
    wake: dict[str, int]
    armed: str
    unique: dict[str, str]


def dump(store: Store, queue: str) -> QueueState:
    """The whole state of a queue: delayed and dead by time, ready in order of delivery.

    It is not a snapshot: a message that moves meanwhile may appear twice.
    """
    # In the order in which a message moves, so that none is missed.
    living = _dump_living(store, queue)
    ids = store.dead.ids(queue, 0, max(store.dead.count(queue), 1))
    dead = [
        {
            "id": letter.id,
            "reason": letter.reason,
            "consumer": letter.consumer,
            "at_ms": letter.at_ms,
            "deliveries": letter.deliveries,
            "step": step,
            "message": text(letter.message),
        }
        for letter, step in zip(
            store.dead.letters(queue, ids), _dead_steps(store, queue, ids), strict=True
        )
    ]
    return {**living, "dead": dead}  # type: ignore[typeddict-item]


def merged(states: list[QueueState]) -> QueueState:
    """The states of a queue's shards as one; delayed messages are in due order again."""
    if len(states) == 1:
        return states[0]
    found: dict[str, Any] = {}
    for name, value in states[0].items():
        each: list[Any] = [state[name] for state in states]  # type: ignore[literal-required]
        if isinstance(value, list):
            found[name] = [*chain.from_iterable(each)]
        else:
            found[name] = dict(ChainMap(*each)) if isinstance(value, dict) else value
    found["delayed"].sort(key=lambda message: message["due_ms"])
    return found  # type: ignore[return-value]


def _dead_steps(store: Store, queue: str, ids: list[str]) -> list[int]:
    records = store.dead.records(queue, [raw(id) for id in ids])
    return [record[0] - 48 for record in records if record]


def _dump_living(store: Store, queue: str) -> dict[str, Any]:
    keys = store.keys(queue)
    waiting = [each for page in Backlog(store, queue).pages() for each in page]
    ready = [
        {"step": step, "message": text(store.readable(queue, raw(each)))}
        for key, step in zip(keys.ready, keys.priority_steps, strict=True)
        for each in read_key(store.client, key)
    ]
    unacked = keys.unacked("")
    held = [
        (text(key)[len(unacked) :], int(tag), store.readable(queue, record))
        for key in sorted(store.client.scan_iter(count=1000))
        if text(key).startswith(unacked)
        for tag, record in store.client.hgetall(key).items()
    ]
    return {
        "delayed": [_delayed(each.member, each.kept) for each in waiting],
        "ready": ready,
        "unacked": [_unacked(*each) for each in sorted(held)],
        "consumers": read_key(store.client, keys.consumers) or {},
        "wake": read_key(store.client, keys.wake) or {},
        "armed": read_key(store.client, keys.armed),
        "unique": read_key(store.client, keys.unique) or {},
    }


def _delayed(member: str, kept: Kept) -> dict[str, Any]:
    id = member.partition("\x1f")[0]
    return {"id": id, "due_ms": kept.due_ms, "step": kept.step, "message": text(kept.message)}


def _unacked(consumer: str, tag: int, record: bytes) -> dict[str, Any]:
    message = text(record[1:])
    return {"consumer": consumer, "tag": tag, "step": record[0] - 48, "message": message}


def seed(
    store: Store,
    queue: str,
    *,
    delayed: Iterable[Mapping[str, Any]] = (),
    ready: Iterable[Mapping[str, Any]] = (),
    unacked: Iterable[Mapping[str, Any]] = (),
    dead: Iterable[Mapping[str, Any]] = (),
    consumers: Mapping[str, int] | None = None,
    wake: Mapping[str, int] | None = None,
    armed: str = "",
    unique: Mapping[str, str] | None = None,
) -> None:
    """Add messages to a queue, each in its state. Existing messages stay.

    They have the form that `dump` returns, so `seed(store, queue, **state)` restores a state. A due
    time may be in the past: the message is delayed until a consumer claims it. A consumer that
    holds messages and has no lease in `consumers` gets one of 30 seconds. Without `wake`, the wake
    tokens that belong to these messages are added.
    """
    _schedule(store, queue, list(delayed), dict(unique or {}))
    store.publish(queue, [Entry("", m.get("step", 0), m["message"]) for m in ready])
    _bury(store, queue, dead)
    held = list(unacked)
    lease_end_ms = store.now_ms() + LEASE_MS
    leases = {each["consumer"]: lease_end_ms for each in held} | dict(consumers or {})
    _hold(store, queue, held, leases)
    if wake is None:
        store.claimable.announce(queue)
    else:
        _set_wake(store, queue, dict(wake), armed)


def _schedule(
    store: Store, queue: str, delayed: list[Mapping[str, Any]], unique: dict[str, str]
) -> None:
    early = copy(store)
    early.now = "0"
    keys = {id: key for key, id in unique.items()}
    # With a relative due time, a repeated message counts as another one.
    entries = [Entry(m["id"], m.get("step", 0), m["message"], f"+{m['due_ms']}") for m in delayed]
    early.schedule(queue, [entry for entry in entries if entry.id not in keys])
    for entry in entries:
        if entry.id in keys:
            early.schedule_unique(queue, entry, keys[entry.id], "refuse")


def _bury(store: Store, queue: str, dead: Iterable[Mapping[str, Any]]) -> None:
    late = copy(store)
    for each in dead:
        late.now = str(each["at_ms"])
        entry = (0, each["id"].partition("\x1f")[0], each["reason"], _record(each))
        late.bury(queue, each["consumer"], [entry])


def _record(each: Mapping[str, Any]) -> bytes:
    return raw(step_char(each.get("step", 0)) + each["message"])


def _hold(store: Store, queue: str, held: list[Mapping[str, Any]], leases: dict[str, int]) -> None:
    keys = store.keys(queue)
    for each in held:
        own = {str(each["tag"]): text(_record(each))}
        write_key(store.client, keys.unacked(each["consumer"]), own)
    write_key(store.client, keys.consumers, leases)


def _set_wake(store: Store, queue: str, wake: dict[str, int], armed: str) -> None:
    keys = store.keys(queue)
    store.client.delete(keys.wake, keys.armed)
    write_key(store.client, keys.wake, wake)
    write_key(store.client, keys.armed, armed)
