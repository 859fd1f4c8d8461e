"""Queues whose backlog is large, and compressed."""

from __future__ import annotations

import random
import uuid
from functools import cache
from typing import Any

import redis

from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.message import compressing
from kombu_delayed.message.zstd import train
from kombu_delayed.store.store import Entry, Store
from tests.kit.task_texts import task

#: The size at which a bucket of the queue is full.
BYTES = 20_000

WORDS = ["order", "invoice", "reminder", "customer", "address", "delivery", "parcel", "payment"]


def arguments(dice: random.Random) -> dict[str, Any]:
    """Arguments of about 300 bytes as JSON."""
    words = {word: dice.randrange(10**6) for word in dice.sample(WORDS, 6)}
    token = uuid.UUID(int=dice.getrandbits(128)).hex
    return {**words, "token": token, "text": "Dear customer, " * 4}


@cache
def entries(count: int, due_ms: int = 2000, seed: int = 1) -> list[Entry]:
    """Tasks with different arguments, due one after the other."""
    dice = random.Random(seed)
    ids = [str(uuid.UUID(int=dice.getrandbits(128), version=4)) for _ in range(count)]
    return [
        Entry(id, 0, task(id, args=(), kwargs=arguments(dice)), str(due_ms + n))
        for n, id in enumerate(ids)
    ]


@cache
def dictionary(seed: int = 1) -> bytes:
    """A dictionary trained on such tasks."""
    parts = [compressing.split(each.id, each.message) for each in entries(150, seed=seed)]
    return train([each.content for each in parts if each])


def make_large(store: Store, queue: str = "q", due_ms: int = 2000) -> None:
    """Make a queue large and give it a dictionary; it contains one message, which is compressed."""
    store.bucket_bytes, store.compression = BYTES, "zstd"
    some = entries(150, due_ms)
    for n in range(0, 150, 25):  # while there is no dictionary
        store.schedule(queue, some[n : n + 25])
    store.known_dictionaries.current.clear()
    store.schedule(queue, entries(1, due_ms, seed=2))
    assert Backlog(store, queue).cancel([each.id for each in some]) == [1] * 150
    assert queue in store.large


def kept(client: redis.Redis, id: str, queue: str = "q") -> bytes:
    """A message's record, as it is in the hash of its queue."""
    keys = client.keys(f"{{{queue}}}:messages*")
    hashes = [key for key in keys if client.type(key) == b"hash"]
    (found,) = (record for key in hashes if (record := client.hget(key, id)))
    return found


def is_compressed(text: bytes) -> bool:
    """Whether a record or a message is compressed, packed or not."""
    return compressing.MARK in text or b"\1z" in text[:20]
