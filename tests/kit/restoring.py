"""The scripts that put a backup back, called with a store."""

from __future__ import annotations

from collections.abc import Iterable

from kombu_delayed.connection.commands import numbers
from kombu_delayed.store.store import Store


def kept(text: str, due_ms: int, step: int = 0) -> str:
    """Return the record of a delayed message, as it is in Redis and in a backup."""
    return f"{step}{due_ms}{text}"


def restore(store: Store, records: Iterable[tuple[str, str]], queue: str = "q") -> tuple[int, int]:
    """Put (member, record) pairs back; returns how many were restored and how many existed."""
    entries = [(member.encode(), record.encode()) for member, record in records]
    move, given = store.restore_call(queue, entries)
    restored, already = numbers(move(store.run, **given))
    return restored, already


def restore_dead(
    store: Store, letters: Iterable[tuple[str, int, str, str]], queue: str = "q"
) -> tuple[int, int]:
    """Put (member, time of burial, record, note) back; returns the same as `restore`."""
    entries = [part for letter in letters for part in letter]
    answer = store.ask("restore_dead", queue, entries=entries)
    restored, already = numbers(answer)
    return restored, already
