"""Dead letters on their way to the stock transport, which has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kombu.utils.json import loads

from ..errors import MessageError
from ..message.envelope import UNREADABLE_BODY, check_task, open_envelope
from ..store.store import CALL_LIMIT, DeadLetter

if TYPE_CHECKING:
    from . import ToStock


def dead_steps(migration: ToStock, queue: str) -> Iterator[int]:
    """Make a queue's dead letters ready, the oldest first; yields how many each step has seen."""
    store, stays = migration.store, 0
    while ids := store.dead_ids(queue, stays, CALL_LIMIT):
        going = []
        for letter in store.dead_letters(queue, ids):
            reason = _refusal(migration, letter)
            if reason:
                migration.report.leave(store.keys(queue).dead, letter.id, reason)
            else:
                going.append(letter.id)
        moved = len(going) if migration.dry else store.replay(queue, going)
        migration.report.count(queue, "dead", "ready", moved)
        stays += len(ids) - (0 if migration.dry else moved)
        yield len(ids)


def _refusal(migration: ToStock, letter: DeadLetter) -> str:
    """Why a stock worker would stop on it, or drop it."""
    try:
        check_task(open_envelope(letter.message, 0).payload)
        message = migration.channel.Message(loads(letter.message), channel=migration.channel)
        _ = message.delivery_tag, message.delivery_info["exchange"]
        _ = message.delivery_info["routing_key"]
    except MessageError as error:
        return f"a stock worker would stop on it: {error}"
    except Exception as error:  # bad base64, a missing member, a type that is none
        return f"a stock worker would stop on it: {error!r}"
    if letter.reason.startswith(UNREADABLE_BODY) and not migration.force:
        return f"a stock worker would drop it: {letter.reason}"
    return ""
