"""Redis keys as plain data.

Lists are in the order of delivery (from their right end in Redis), hashes map text to text, sorted
sets map text to whole numbers.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from redis import Redis

Value: TypeAlias = str | list[str] | dict[str, str] | dict[str, int]


def read_key(client: Redis, key: str) -> Value:
    """Return the value of a key, "" if it does not exist."""
    kind = text(client.type(key))
    if kind == "none":
        return ""
    if kind == "string":
        return text(client.get(key))
    if kind == "list":
        return [text(item) for item in reversed(client.lrange(key, 0, -1))]
    if kind == "hash":
        return {text(name): text(value) for name, value in client.hgetall(key).items()}
    if kind == "zset":
        found: Any = client.zrange(key, 0, -1, withscores=True)
        return {text(name): int(score) for name, score in found}
    if kind == "set":
        return sorted(text(member) for member in client.smembers(key))
    raise TypeError(f"{key!r} is a {kind}")


def write_key(client: Redis, key: str, value: Any) -> None:
    """Add a value in the form of `read_key`. Does nothing if it is empty."""
    if not value:
        return
    if isinstance(value, str):
        client.set(key, raw(value))
    elif isinstance(value, list):
        client.rpush(key, *map(raw, reversed(value)))
    elif all(isinstance(each, str) for each in value.values()):
        client.hset(key, mapping={raw(name): raw(each) for name, each in value.items()})
    else:
        client.zadd(key, {raw(name): score for name, score in value.items()})


def text(value: Any) -> str:
    """Return bytes as text. Bytes that are not UTF-8 survive."""
    return str(value.decode(errors="surrogateescape"))


def raw(value: str) -> bytes:
    """Return the bytes from which `text` made it."""
    return value.encode(errors="surrogateescape")
