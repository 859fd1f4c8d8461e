"""A Redis database as plain data, and the short forms in which tests write messages.

Lists are in the order of delivery (their head is the right end), hashes map text to text, and
sorted sets map text to whole numbers.
"""

from __future__ import annotations

import json
import re
from typing import Any

import redis

from kombu_delayed.message.envelope import open_kept
from kombu_delayed.store.keys import format_version
from kombu_delayed.store.store import Entry
from kombu_delayed.testing.keyspace import Value, read_key, write_key

#: Keys that are not about messages: lifecycle events, moves, urgency hints, the format version.
_BESIDE = ("}:events", "}:moved", "}:partitions:urgent", format_version())


_BUCKET = re.compile(r"(.*\}:(?:messages|dead-messages|dead-reasons))(?::\d+)?")


def message(body: str, **extra: Any) -> str:
    """Return a message of Kombu as JSON; `extra` are members of its envelope."""
    return json.dumps({"body": body, "properties": {}, **extra}, separators=(",", ":"))


def promoted(text: str, due_ms: int) -> str:
    """Return the form of a message in a ready list that has waited in the backlog."""
    return f'{{"due_ms":{due_ms},{text[1:]}'


def returned(text: str, deliveries: int) -> str:
    """Return the form of a message that came back from a consumer."""
    return f'{text[:-1]},"deliveries":{deliveries}}}'


def entry(id: str, due: int | str = "", step: int = 0, body: str | None = None) -> Entry:
    """Return a message on its way into a queue; its body is its id unless told otherwise."""
    return Entry(id, step, message(id if body is None else body), str(due))


def all_keys(client: redis.Redis) -> list[str]:
    """Return every key of the database that is about messages, sorted."""
    keys = (key.decode() for key in client.keys("*"))
    marks = "}:reclaimed:"  # of consumers whose leases have expired: gone in a day
    return sorted(key for key in keys if not key.endswith(_BESIDE) and marks not in key)


def state(client: redis.Redis) -> dict[str, Value]:
    """Return the whole database. The due times of delayed messages are checked, and left out."""
    found = _whole({key: read_key(client, key) for key in all_keys(client)})
    for key in [key for key in found if key.endswith("}:messages")]:
        due_times: dict[str, int] = {}
        for partition in [each for each in found if each.startswith(key[:-8] + "delayed:")]:
            due_times |= found[partition]  # type: ignore[arg-type]
        kept = {id: open_kept(text.encode()) for id, text in found[key].items()}  # type: ignore[union-attr]
        assert {id: each.due_ms for id, each in kept.items()} == due_times
        found[key] = {id: f"{each.step}{each.message.decode()}" for id, each in kept.items()}
    return found


def _whole(found: dict[str, Value]) -> dict[str, Value]:
    """Join hashes that are spread over buckets."""
    whole: dict[str, Value] = {}
    for key, value in found.items():
        if key.endswith(":buckets"):
            continue
        if match := _BUCKET.fullmatch(key):
            part: Any = whole.setdefault(match[1], {})
            assert not part.keys() & value.keys(), f"{key} has what another bucket has"
            part.update(value)
        else:
            whole[key] = value
    return whole


def seed(client: redis.Redis, before: dict[str, Any]) -> None:
    """Add the data that `state` would return."""
    for key, value in before.items():
        write_key(client, key, value)


def note(reason: str, deliveries: int = 1, consumer: str = "A", at_ms: int = 1000) -> str:
    """Return the note of a burial, in the form that `dead_state` gives it."""
    return _in_order(
        {"reason": reason, "deliveries": deliveries, "consumer": consumer, "at_ms": at_ms}
    )


def dead_state(client: redis.Redis) -> dict[str, Any]:
    """Return the whole database, with the notes of dead letters in one order of members."""
    found: dict[str, Any] = dict(state(client))
    for key in (key for key in found if key.endswith(":dead-reasons")):
        found[key] = {id: _in_order(json.loads(text)) for id, text in found[key].items()}
    return found


def _in_order(members: dict[str, Any]) -> str:
    return json.dumps(members, sort_keys=True)
