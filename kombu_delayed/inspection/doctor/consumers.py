"""Examines consumers: their leases, their slots at the gate, and their wake tokens."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from ...connection.commands import scored
from ...consumer.lease.consumer_id import silence_seconds
from ..backlog import NEVER_MS, scan
from .examination import Examination, text

#: Celery's priorities are 0 to 9.
HIGHEST_STEP = 9

#: A consumer that has taken a wake token puts it back or claims within this time.
PATIENCE_SECONDS = 1.0


class Consumers:
    """The consumers of a queue, and the wake tokens for them."""

    def __init__(self, case: Examination, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._case = case
        self._store, self._queue, self._keys = case.store, case.queue, case.keys
        self._patience_seconds = patience_seconds

    def examine(self) -> None:
        """Examine all of them."""
        self._leases()
        self._gate()
        self._other_steps()
        if (pause := self._store.pauses.of(self._queue)) is not None:
            why = f": {pause.why}" if pause.why else ""
            self._case.add("paused", f"by {pause.by}{why}")
            return  # no consumer needs a token for messages that none may claim
        self._wake()
        self._tokens()

    def _leases(self) -> None:
        if self._is_another_server():
            return
        known = self._store.leases.consumers(self._queue)
        ended = {name: unacked for name, left_ms, unacked in known if left_ms <= 0}
        for name in self._silent(ended) if self._case.fix else ended:
            self._reclaim("lease", name, ended[name])
        registered = {name for name, _, _ in known}
        for raw_name in self._case.names.holders:
            name = raw_name.decode(errors="surrogateescape")
            # It may have registered or ended since.
            if name in registered or self._is_registered(name):
                continue
            key = self._keys.unacked("").encode() + raw_name
            if unacked := self._store.run("HLEN", key):
                self._reclaim("unregistered", name, unacked)

    def _other_steps(self) -> None:
        """Report messages with priority steps of other producers, which no consumer reads here."""
        run, known = self._store.run, self._keys.priority_steps
        lists = {n: self._keys.ready_list(n) for n in range(HIGHEST_STEP + 1) if n not in known}
        if lists and run("EXISTS", *lists.values()):
            for step, key in lists.items():
                if count := run("LLEN", key):
                    self._case.add("step", f"step {step}: {count} ready", fixed=False)

    def _silent(self, consumers: Collection[str]) -> list[str]:
        """Return those that do not renew a lease for its whole length.

        A lease may also look expired because the server's clock was set.
        """
        ends = {name: self._end_of(name) for name in consumers}
        seconds = [silence_seconds(name) for name in consumers]
        deadline = time.monotonic() + max(seconds, default=0.0)
        while time.monotonic() < deadline and ends:
            time.sleep(0.05)
            ends = {name: end for name, end in ends.items() if self._end_of(name) == end}
        return [*ends]

    def _end_of(self, consumer: str) -> bytes | None:
        end: bytes | None = self._store.run("ZSCORE", self._keys.consumers, consumer)
        return end

    def _is_registered(self, consumer: str) -> bool:
        return self._store.run("ZSCORE", self._keys.consumers, consumer) is not None

    def _reclaim(self, kind: str, consumer: str, unacked: int) -> None:
        shown = text(consumer.encode(errors="surrogateescape"))
        self._case.add(kind, f"{shown} ({unacked} messages)")
        if self._case.fix:
            self._store.leases.reclaim(self._queue, consumer)

    def _is_another_server(self) -> bool:
        """Return whether leases are from before a restart or failover and not renewed since."""
        granted_by: bytes | None = self._store.run("GET", self._keys.granted_by)
        if granted_by is None or self._store.now:
            return False
        info: bytes = self._store.run.to(("GET", self._keys.granted_by))("INFO", "server")
        return b"run_id:" in info and b"run_id:" + granted_by not in info

    def _gate(self) -> None:
        """Examine slots, after the leases: by then dead consumers have lost theirs."""
        keys, run = self._keys, self._store.run
        for name in self._case.names.slots:
            key = keys.slots("").encode() + name
            if run("ZSCORE", keys.consumers, name) is None and run("EXISTS", key):
                self._case.add("slots", text(name))
                if self._case.fix:
                    run("UNLINK", key)
        self._case.sweep("repair_gate")

    def _wake(self) -> None:
        """Look for missing tokens, several times if a consumer may be holding one."""
        deadline = time.monotonic() + self._patience_seconds
        while True:
            silent, watched = self._silence()
            if not silent:
                return
            if not watched or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        self._case.add("silent", silent)
        if self._case.fix:
            self._store.claimable.announce(self._queue)

    def _tokens(self) -> None:
        """Report idle consumers that take no token, although idle consumers wait for one."""
        consumers = self._deaf()
        if not consumers:
            return
        if self._case.fix:
            self._store.run("ZREM", self._keys.wake, "now", "due")
            self._store.claimable.announce(self._queue)
        still = self._deaf() if self._case.fix else consumers
        for name in consumers:
            self._case.add("untaken", name, fixed=name not in still)

    def _deaf(self) -> set[str]:
        """Return the idle consumers if a token stays for longer than they take to notice it."""
        idle, tokens = self._idle(), self._tokens_now()
        deadline = time.monotonic() + self._patience_seconds
        while idle and tokens and time.monotonic() < deadline:
            time.sleep(0.05)
            idle, tokens = idle & self._idle(), tokens & self._tokens_now()
        return idle - self._holders() if idle and tokens else set()

    def _holders(self) -> set[str]:
        """Return the consumers that hold messages of any queue: they may have no room for more."""
        found = scan(self._store, self._store.keys("").prefix, "{*}:unacked:*")
        names = (key.rpartition(b"}:unacked:")[2] for key in found)
        return {name.decode(errors="surrogateescape") for name in names}

    def _idle(self) -> set[str]:
        consumers = self._store.leases.consumers(self._queue)
        return {name for name, left_ms, unacked in consumers if left_ms > 0 and not unacked}

    def _tokens_now(self) -> set[tuple[Any, Any]]:
        """Return each with its time to claim. Waiting consumers, on a Cluster, score higher."""
        found = self._store.run("ZRANGEBYSCORE", self._keys.wake, "-inf", NEVER_MS, "WITHSCORES")
        return {*scored(found)}

    def _silence(self) -> tuple[str, bool]:
        """Describe messages without a token, or "", and say whether there is a live consumer."""
        keys, run = self._keys, self._store.run
        size = self._store.size(self._queue)
        # A move adds message and token at once, so looking at messages first misses none.
        tokens = {name for name, _ in self._tokens_now()}
        holder = (run("GET", keys.armed) or b"").partition(b" ")[2].decode(errors="replace")
        holder = holder.removesuffix("*")  # it has passed on the promise, and watches it
        consumers = self._store.leases.consumers(self._queue)
        living = {name for name, left_ms, _ in consumers if left_ms > 0}
        missing = []
        if size.ready and b"now" not in tokens:
            missing.append(f"{size.ready} ready")
        is_missed = size.delayed and not tokens and holder not in living
        # A consumer that has taken a token for a later time keeps it until then.
        if is_missed and (not living or self._store.metrics(self._queue).due):
            missing.append(f"{size.delayed} delayed")
        return ", ".join(missing), bool(living)
