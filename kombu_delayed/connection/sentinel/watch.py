"""Learns from the Sentinels which server is the master, as soon as that changes.

A healthy master that is replaced learns of it some ten seconds later. Until then it accepts writes,
and all of them are lost when it becomes a replica. So each process listens to the Sentinels. The
one that leads a failover announces the promotion before it happens. From then on nothing is sent
until the new master is known.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from time import monotonic
from typing import Any, Protocol
from weakref import WeakSet

import redis
from redis.exceptions import ConnectionError

from kombu_delayed.errors import ServerNotReady

from .. import native

logger = native.get_logger(__name__)

Address = tuple[str, int]

#: The leader of a failover publishes these, some 0.1 s apart, before a replica becomes the master.
_BEFORE = tuple(
    f"+failover-state-{state}" for state in ("select-slave", "send-slaveof-noone", "wait-promotion")
)
#: The leader publishes the first one, and the other Sentinels the second one at the same time.
_PROMOTED, _SWITCHED = "+promoted-slave", "+switch-master"
_ABORTED = "-failover-abort-*"

#: How long to wait for a promotion that was announced.
HOLD_SECONDS = 3.0

#: A Sentinel that has been silent for this long is sent a PING.
PING_SECONDS = 5.0

#: How long to wait before trying again to listen to a Sentinel.
RETRY_SECONDS = 1.0

#: How long a process that has just started waits for each Sentinel to report a failover.
ASK_SECONDS = 1.0

#: The rights that a user needs to listen to Sentinels with an ACL.
RIGHTS = "+subscribe +psubscribe +ping &*"

#: How often a thread that may not send checks whether it may.
LOOK_SECONDS = 0.01


class MasterChanges(ServerNotReady):
    """A failover is under way; nothing was sent to the master that is about to be replaced."""


class Follower(Protocol):
    """Something that is notified, in another thread, of another master."""

    def master_changed(self) -> None:
        """Called when connections to the old master are no longer usable."""


class MasterWatch:
    """Follows what the Sentinels report about one master, for all connections of this process.

    `parameters` are those of connections to the Sentinels.
    """

    def __init__(
        self, name: str, sentinels: Sequence[Address], parameters: Mapping[str, Any]
    ) -> None:
        self.name = name
        #: The master; None until it has been found.
        self.address: Address | None = None
        #: The Sentinel that has reported it, whose answer counts more than that of one that lags.
        self.named_by: Address | None = None
        #: The Sentinel that leads a failover -> no command is sent until then (monotonic clock).
        self._holds: dict[Address, float] = {}
        self._sentinels = sentinels
        self._parameters = parameters
        self._epoch = 0
        self._followers: WeakSet[Follower] = WeakSet()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = native.lock()  # the keepers of leases take it, too
        self._listening: set[Address] = set()
        #: Why a Sentinel cannot be listened to, and whether a warning has reported that none can.
        self._unheard: dict[Address, str] = {}
        self._has_warned = False
        #: The Sentinels that have yet to say whether a failover is under way, and their deadline.
        self._asked: set[Address] = set()
        self._asked_until = -math.inf

    def _locked(self) -> Any:
        if self._pid != os.getpid():
            self._reset()  # a fork: no thread of the parent is here, and one may have had the lock
        return self._lock

    def follow(self, follower: Follower) -> None:
        """Notify a follower of each new master, until it leaves."""
        with self._locked():
            self._followers.add(follower)

    def start(self) -> None:
        """Listen for as long as there are followers. Idempotent, and safe in a forked child.

        Threads of the operating system listen, as greenlets cannot while another one is busy.
        """
        with self._locked():
            silent = [each for each in self._sentinels if each not in self._listening]
            if silent and not self._listening:
                self._asked.update(silent)
                self._asked_until = monotonic() + ASK_SECONDS
            self._listening.update(silent)
            for each in silent:
                self._unheard.pop(each, None)
        for sentinel in silent:
            name = f"kombu-delayed-sentinel-{sentinel[0]}:{sentinel[1]}"
            native.start_thread(partial(self._run, sentinel), name)

    def leave(self, follower: Follower) -> None:
        """Stop notifying a follower. When the last has left, the threads end within seconds."""
        with self._locked():
            self._followers.discard(follower)

    def found(self, address: Address, epoch: int) -> bool:
        """Record a Sentinel's answer: the master's address since the failover with this epoch.

        Returns False, and ignores the answer, if it lags behind what is known.
        """
        with self._locked():
            if epoch < self._epoch:
                return False
            is_news = self._take(address, epoch)
        if is_news:
            self._notify()
        return True

    def found_no_newer(self, address: Address, epoch: int) -> None:
        """Record an older answer, as all Sentinels that answer lag.

        They were set up again, or the others have not learned of the failover yet.
        """
        with self._locked():
            self._epoch = epoch
        self.found(address, epoch)

    @property
    def is_held(self) -> bool:
        """Whether the master is being replaced, or may be: the Sentinels have yet to answer."""
        is_being_asked = bool(self._asked) and monotonic() < self._asked_until
        return is_being_asked or any(map(self._is_announced_by, tuple(self._holds)))

    def _is_announced_by(self, sentinel: Address) -> bool:
        return monotonic() < self._holds.get(sentinel, -math.inf)

    def wait(self) -> None:
        """Return when commands can be sent."""
        while self.is_held:
            time.sleep(LOOK_SECONDS)

    def _take(self, address: Address, epoch: int) -> bool:
        """Set the master. Returns whether to notify the followers. The caller holds the lock."""
        before, self.address = self.address, address
        was_held = False
        if epoch > self._epoch:
            was_held = any(map(self._is_announced_by, tuple(self._holds)))
            self._holds.clear()
        self._epoch = epoch
        return before not in (None, address) or was_held

    def _notify(self) -> None:
        with self._lock:
            followers, address = list(self._followers), self.address
        if address is not None:
            logger.info("The master of %r is %s:%d", self.name, *address)
        for follower in followers:
            try:
                follower.master_changed()
            except Exception as error:  # a follower may just be closing
                logger.debug("Cannot tell %r about another master: %s", follower, error)

    # The rest runs in one thread for each Sentinel.

    def _run(self, sentinel: Address) -> None:
        while self._is_followed(sentinel):
            try:
                with closing(redis.Redis(*sentinel, **self._parameters)) as client:
                    self._listen(sentinel, client)
            except Exception as error:  # of any kind: the Sentinel may be back later
                self._asked.discard(sentinel)
                self._cannot_hear(sentinel, error)
                time.sleep(RETRY_SECONDS)

    def _cannot_hear(self, sentinel: Address, error: Exception) -> None:
        logger.debug("Cannot subscribe to Sentinel %s:%d: %s", *sentinel, error)
        with self._lock:
            self._unheard[sentinel] = f"{sentinel[0]}:{sentinel[1]}: {error}"
            if self._has_warned or len(self._unheard) < len(self._sentinels):
                return
            self._has_warned, errors = True, "; ".join(self._unheard.values())
        logger.warning(
            "Cannot subscribe to any of the Sentinels of %r. Until that works, messages may be "
            "lost in a planned failover. A user of the Sentinels needs %s. (%s)",
            self.name,
            RIGHTS,
            errors,
        )

    def _can_hear(self, sentinel: Address, kind: str) -> None:
        with self._lock:
            self._unheard.pop(sentinel, None)
            if kind != "psubscribe":  # a subscription may be accepted and then ended
                self._has_warned = False

    def _is_followed(self, sentinel: Address) -> bool:
        with self._lock:
            if not self._followers:
                self._listening.discard(sentinel)
                self._asked.discard(sentinel)
            return bool(self._followers)

    def _listen(self, sentinel: Address, client: redis.Redis) -> None:
        with closing(client.pubsub()) as channel:
            channel.psubscribe(*_BEFORE, _PROMOTED, _SWITCHED, _ABORTED)
            self._compare(sentinel, client)
            self._asked.discard(sentinel)
            was_asked = False
            while self._is_followed(sentinel):
                message = channel.get_message(timeout=PING_SECONDS)
                if message is None and was_asked:
                    raise ConnectionError("it does not answer")
                if was_asked := message is None:
                    channel.ping()
                    continue
                self._can_hear(sentinel, message["type"])
                if message["type"] == "pmessage":
                    event, text = _text(message["channel"]), _text(message["data"])
                    self._hear(sentinel, client, event, text)

    def _compare(self, sentinel: Address, client: redis.Redis) -> None:
        """Find out about a failover that this process has missed, or that is under way.

        Announcements have no epoch, and a Sentinel that lags may announce an older failover.
        """
        masters: Any = client.sentinel_masters()
        state = masters.get(self.name)
        address = state and present(client, self.name, state)
        client.connection_pool.disconnect(inuse_connections=False)  # not needed any more
        if not state:
            return
        with self._lock:  # report each failover once: later it might end the wait for the next
            is_newer = (epoch := int(state.get("config-epoch", 0))) > self._epoch
            if is_newer:
                self.named_by = sentinel
            is_news = is_newer and self._take(address, epoch)
        if is_news:
            self._notify()
        if not _is_failing_over(state):
            self._holds.pop(sentinel, None)
        elif address == (state["ip"], state["port"]):
            self._hold(sentinel)
        else:
            self.named_by = sentinel  # the others may still name the old one for a moment

    def _hold(self, sentinel: Address) -> None:
        self._holds[sentinel] = monotonic() + HOLD_SECONDS

    def _hear(self, sentinel: Address, client: redis.Redis, event: str, text: str) -> None:
        parts = text.split()
        is_switched = event == _SWITCHED and parts[0] == self.name
        if is_switched or (event == _PROMOTED and self.name in parts[5:6]):
            self._compare(sentinel, client)
        elif event in _BEFORE and parts[1] == self.name:
            is_news = not self._is_announced_by(sentinel)
            self._hold(sentinel)
            if is_news:  # it may be over if the Sentinel or this process was paused
                self._compare(sentinel, client)
        elif event.startswith(_ABORTED[:-1]) and parts[1] == self.name:
            self._holds.pop(sentinel, None)
            self._notify()


def present(client: Any, name: str, state: Mapping[str, Any]) -> Address:
    """Return the master's address, given a Sentinel's state of it.

    At the leader of a failover the state has the old address until the failover has ended.
    """
    if not _is_failing_over(state):
        return state["ip"], state["port"]
    # The method for it raises TypeError in redis-py 6.
    host, port = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", name)
    return _text(host), int(port)


def _is_failing_over(state: Mapping[str, Any]) -> bool:
    return "failover_in_progress" in state.get("flags", "")


def _text(raw: Any) -> str:
    return raw.decode() if isinstance(raw, bytes) else str(raw)


_watches: dict[str, MasterWatch] = {}


def watch_of(name: str, sentinels: Sequence[Address], parameters: Mapping[str, Any]) -> MasterWatch:
    """Return this process's watch of a master: one for each way to reach the Sentinels."""
    parts = [name, *sentinels, *(item for item in parameters.items() if item[0] != "retry")]
    return _watches.setdefault(repr(parts), MasterWatch(name, sentinels, parameters))
