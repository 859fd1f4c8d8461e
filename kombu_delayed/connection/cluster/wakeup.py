"""The connection on which a consumer receives wake tokens from one node of a Cluster.

A command can block for keys of one slot only, so consumers of a Cluster do not block. Instead, a
script that adds a token sends it to the consumer that has waited longest, over that consumer's own
pub/sub channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from redis import exceptions
from redis.crc import key_slot

from kombu_delayed.errors import translate

from ..commands import pack
from ..native import get_logger
from ..wakeup import WakeConnection

logger = get_logger(__name__)

#: Stands between the key of the tokens and the consumer's name in the name of a channel.
MARK = ">"


class NodeWake(WakeConnection):
    """Subscribes to one channel per queue. A token that is published there is this consumer's.

    A connection that has been silent for `limit_seconds` is sent a PING.
    """

    def __init__(
        self,
        connection: Any,
        connect: Callable[[Any], None],
        moved: Callable[[exceptions.MovedError], None],
        wake_key: Callable[[str], str],
        limit_seconds: float,
        consumer: Callable[[], str],
        sharded: bool = True,
    ) -> None:
        super().__init__(lambda: connection, wake_key, limit_seconds)
        self._connect = connect
        self._moved = moved
        self._consumer = consumer
        self._verb = "S" if sharded else ""
        self._heard: list[tuple[str, int]] = []
        self._asked = False

    def listens(self, queue: str) -> bool:
        """Return whether a token of a queue would reach this consumer."""
        return self._channel(queue).encode() in self._queues

    def _channel(self, queue: str) -> str:
        return f"{self._wake_key(queue)}{MARK}{self._consumer()}"

    def start(self, queues: Iterable[str]) -> None:
        """Listen for tokens of exactly these queues, from the moment this returns.

        Queues that another node has now are skipped.
        """
        names = (self._consumer(), *queues)
        if names == self._started_with and self.waiting:
            return
        wanted = {self._channel(queue).encode(): queue for queue in names[1:]}
        self._started_with = ()
        if wanted.keys() == self._queues.keys() and self.waiting:
            self._started_with = names
            return
        if self.connection is None:
            self.connection = self._acquire()
        if not self._is_same:
            self._queues = {}
        if self.socket is None:
            self._connect(self.connection)
        self._asked_over = self.socket
        self._change("UNSUBSCRIBE", self._queues.keys() - wanted.keys())
        self._queues = {c: queue for c, queue in self._queues.items() if c in wanted}
        self._change("SUBSCRIBE", wanted.keys() - self._queues.keys())
        missing = wanted.keys() - self._queues.keys()
        while missing:
            self._receive(wanted)
            missing = wanted.keys() - self._queues.keys()
        self._queues = wanted
        if len(wanted) == len(names) - 1:  # none was skipped
            self._started_with = names
        self._heard_from()

    def _change(self, verb: str, channels: Iterable[bytes]) -> None:
        # One command per channel: they are in several slots.
        commands = [pack((self._verb + verb, channel)) for channel in sorted(channels)]
        if commands:
            self.connection.send_packed_command(commands, check_health=False)

    def _receive(self, wanted: dict[bytes, str]) -> None:
        try:
            answer = self.connection.read_response()
        except exceptions.MovedError as error:
            self._moved(error)
            for channel in [each for each in wanted if key_slot(each) == error.slot_id]:
                del wanted[channel]
            return
        except exceptions.NoPermissionError as error:
            raise translate(error) from error
        except exceptions.ResponseError as error:
            raise exceptions.ConnectionError(f"cannot listen for wake tokens: {error}") from error
        if not isinstance(answer, list):
            return  # the answer to a PING while there is no queue to listen for
        kind, channel, *more = answer
        if kind in (b"ssubscribe", b"subscribe") and channel in wanted:
            self._queues[channel] = wanted[channel]
        elif kind in (b"smessage", b"message") and channel in self._queues:
            self._heard.append((self._queues[channel], int(more[0])))
        elif kind in (b"sunsubscribe", b"unsubscribe") and channel in self._queues:
            # Not requested: another node has its slot now. A claim finds out which.
            self._started_with = ()
            self._heard.append((self._queues.pop(channel), 0))

    def heard(self, polled: bool = False) -> list[tuple[str, int]]:
        """Return the tokens that have arrived, each as (queue, when in ms; 0: now).

        `polled`: a poller has reported that there is something to read.
        """
        while self.socket is not None and self.connection.read_ahead(polled):
            self._receive(self._queues)
            self._heard_from()
            polled = False
        found, self._heard = self._heard, []
        return found

    def _heard_from(self) -> None:
        self._asked = False
        self.overdue_at = monotonic() + self._limit_seconds

    def check(self, now: float) -> bool:
        """Like `WakeConnection.check`, but send a PING on a silent connection first."""
        if self._asked or not self.waiting or now < self.overdue_at or self._is_readable():
            return super().check(now)
        self.connection.send_packed_command([pack(("PING",))], check_health=False)
        self._asked, self.overdue_at = True, now + self.grace_seconds
        return False

    def reset(self) -> None:
        """Disconnect. From now on tokens stay or go to others, so the caller must claim."""
        super().reset()
        self._queues, self._heard, self._asked = {}, [], False
        self.overdue_at = math.inf
