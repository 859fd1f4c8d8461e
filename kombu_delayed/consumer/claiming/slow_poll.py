"""A slow poll: one look at many queues, which claims nothing.

Almost always there is nothing, and one command finds that out for a hundred queues. Otherwise
a script tells which queues have messages that no consumer has promised to claim.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from kombu_delayed.store.store import Store, chunks

from .sources import Source

#: How many queues with a promise are looked at more closely each time, in case an earlier message
#: has come and its token was lost. If there are more of them, the others come another time.
PROMISED_LIMIT = 25

#: For how many queues each look counts the consumers, which share the polls.
COUNTED_LIMIT = 3


def look(store: Store, sources: Sequence[Source], now: float) -> set[str]:
    """Returns the queues to claim from. For the others it notes when a consumer has promised to."""
    parts = [*chunks(sources, store.look_limit)]
    counted = _some(sources, COUNTED_LIMIT)
    promised = [source for source in sources if _is_promised(source, now)]
    wanted = [[(source.queue, not _is_promised(source, now)) for source in part] for part in parts]
    counts, consumers = store.claimable.count_keys(wanted, [source.queue for source in counted])
    for source, count in zip(counted, consumers, strict=True):
        source.consumers = max(count, 1)
    doubtful = [part for part, count in zip(parts, counts, strict=True) if count]
    checked = [*doubtful, *chunks(_some(promised, PROMISED_LIMIT), store.look_limit)]
    found: set[str] = set()
    answers = store.claimable.look([[source.queue for source in part] for part in checked])
    for part, answer in zip(checked, answers, strict=True):
        for source, left_ms in zip(part, answer, strict=True):
            if left_ms == 0:
                found.add(source.queue)
            source.promised_at = now + left_ms / 1000
    return found


def _is_promised(source: Source, now: float) -> bool:
    """Whether this consumer or another one claims when the next message is due."""
    return source.promised_at > now or source.due_at < math.inf


def _some(sources: Sequence[Source], limit: int) -> list[Source]:
    return random.sample(sources, min(len(sources), limit))
