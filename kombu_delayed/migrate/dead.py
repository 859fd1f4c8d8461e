"""Moves dead letters to the stock transport, which has none."""

from __future__ import annotations

from collections.abc import Iterator

from kombu.utils.json import loads

from ..errors import MessageError
from ..message.envelope import UNREADABLE_BODY, check_task, open_envelope
from ..store.dead_letters import DeadLetter
from ..store.store import CALL_LIMIT
from .migration import Migration


def dead_steps(migration: Migration, queue: str, *, force: bool) -> Iterator[int]:
    """Make a queue's dead letters ready, the oldest first. Yields how many each step has seen.

    With `force`, also those that a stock worker would drop.
    """
    store, stays = migration.store, 0
    while ids := store.dead.ids(queue, stays, CALL_LIMIT):
        going = []
        for letter in store.dead.letters(queue, ids):
            reason = _refusal(migration, letter, force)
            if reason:
                migration.report.leave(store.keys(queue).dead, letter.id, reason)
            else:
                going.append(letter.id)
        moved = len(going) if migration.dry else store.dead.replay(queue, going)
        migration.report.count(queue, "dead", "ready", moved)
        stays += len(ids) - (0 if migration.dry else moved)
        yield len(ids)


def _refusal(migration: Migration, letter: DeadLetter, force: bool) -> str:
    """Return why a stock worker would stop on it or drop it; empty if it would not."""
    try:
        check_task(open_envelope(letter.message, 0).payload)
        message = migration.channel.Message(loads(letter.message), channel=migration.channel)
        _ = message.delivery_tag, message.delivery_info["exchange"]
        _ = message.delivery_info["routing_key"]
    except MessageError as error:
        return f"a stock worker would stop on it: {error}"
    except Exception as error:  # bad base64, a missing member, an unknown type
        return f"a stock worker would stop on it: {error!r}"
    if letter.reason.startswith(UNREADABLE_BODY) and not force:
        return f"a stock worker would drop it: {letter.reason}"
    return ""
