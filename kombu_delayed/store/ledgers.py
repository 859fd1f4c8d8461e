"""What a job has done with which id, as scripts note it in each queue."""

from __future__ import annotations

from .calls.caller import chunks
from .store import Store

#: Parts of a ledger that one call drops, and how many parts there are.
DROPPED_TOGETHER, SLICES = 64, 4096


def drop_ledger(store: Store, queue: str, ledger: str) -> int:
    """Forget it, in calls that take no time; returns how many hashes it was.

    Its own hash goes last: with it a call that was broken off can be found again.
    """
    keys = store.keys(queue)
    main = keys.job(ledger)
    if store.run("ZSCORE", keys.ledgers_until, main) is None:
        return 0
    is_sliced = store.run("HEXISTS", main, "\x1fin-slices")
    parts = [keys.job_slice(ledger, f"{n:03x}") for n in range(SLICES if is_sliced else 0)]
    count = 0
    for together in (*chunks(parts, DROPPED_TOGETHER), [main]):
        count += int(store.ask("drop_ledgers", queue, ledgers=[*together]))
    return count
