"""The contents of the server: messages, entries of gates, and keys that should be gone."""

from __future__ import annotations

import base64
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Set
from typing import Any

from tests.crash.history import Key

_ID = re.compile(rb'"id": ?"([0-9a-f-]{36})"')
_RETRIES = re.compile(rb'"retries": ?(\d+)')

#: The keys that may stay when queues are empty and workers have ended, and their contents.
STAY = {
    r"_kombu\.binding.*": "bindings of exchanges, as Kombu keeps them",
    r".*\}:unique(-due)?": "unique keys of delivered messages, until the next unique message",
    r".*\}:granted-by": "the server that granted the leases",
    r".*\}:policies": "the declared policies of a queue",
    r".*\}:paused": "the end of a pause, for a day",
    r".*\}:moved": "messages that moved within the backlog, for an hour",
    r".*\}:expectations(-until)?": "outcomes of expectations, until they expire",
    r".*\}:answers(-until)?": "early answers, until they expire",
    r".*\}:events": "the latest lifecycle events",
    r".*\}:outcomes:.*": "recorded outcomes of tasks, for days",
    r"kombu-delayed:format": "the version of the format",
    r"kombu-delayed-revoked": "the last revoked tasks, for workers that start",
    r"kombu-delayed-shards|.*\}:shards": "the highest number of shards of a queue",
}
_REPLIES = re.compile(r"\{?([^{}]+\.reply\.celery\.pidbox)\}?(?::wake)?")
_STAY = re.compile("|".join(f"(?:{pattern})" for pattern in STAY))


def messages(server: Any) -> dict[Key, list[str]]:
    """Task messages that are on the server, each with the keys that have it."""
    found: dict[Key, list[str]] = defaultdict(list)
    with server.client() as client:
        for key in client.scan_iter("*"):
            if key.endswith(b":expectations") or b":outcomes:" in key:
                continue  # a key about messages that have ended
            for value in _values(client, key):
                id, retries = _ID.search(value), _RETRIES.search(value)
                if id:
                    what = id[1].decode(), int(retries[1]) if retries else 0
                    found[what].append(key.decode())
    return found


def held(server: Any) -> dict[str, int]:
    """The entries of gates: slots, and messages that wait."""
    found: dict[str, int] = {}
    with server.client() as client:
        for key in client.scan_iter("*:gate:slots*"):
            # A consumer of global limits numbers its calls under the empty name.
            found |= {f"{key.decode()} {name.decode()}": 1 for name in client.hkeys(key) if name}
        for key in client.scan_iter("*:delayed:waiting"):
            found[key.decode()] = client.zcard(key)
    return found


def leaks(keys: Any) -> list[str]:
    """Those of all keys on the server that should be gone."""
    return sorted(key for key in keys if not _STAY.fullmatch(key))


def without_replies_of(server: Any, keys: Iterable[str], workers: Set[str]) -> list[str]:
    """The keys, except those that hold only late replies of these workers to remote control."""
    with server.client() as client:
        return [key for key in keys if not _are_replies_of(client, key, workers)]


def _are_replies_of(client: Any, key: str, workers: Set[str]) -> bool:
    found = _REPLIES.fullmatch(key)
    if found is None:
        return False
    replies = [
        each for name in (found[1], f"{{{found[1]}}}") for each in client.lrange(name, 0, -1)
    ]
    who = {
        name for each in replies for name in json.loads(base64.b64decode(json.loads(each)["body"]))
    }
    return bool(who) and who <= workers


def all_keys(server: Any) -> list[str]:
    """The names of all keys without an expiry; the keys of reply queues have one."""
    with server.client() as client:
        keys = [key for key in client.scan_iter("*") if client.pttl(key) < 0]
    return [key.decode(errors="replace") for key in keys]


def _values(client: Any, key: bytes) -> list[bytes]:
    kind = client.type(key)
    if kind == b"list":
        return client.lrange(key, 0, -1)
    if kind == b"hash":
        return [_with_id(*each) for each in client.hgetall(key).items()]
    return []


def _with_id(field: bytes, value: bytes) -> bytes:
    """Adds the id to a packed message, which has it only as its field."""
    is_packed = b"\1" in value[:20]
    return b'"id": "' + field.partition(b"\x1f")[0] + b'"' + value if is_packed else value
