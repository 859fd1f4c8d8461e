"""Runs the consumers of all channels of one connection, and reads what has come for them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from queue import Empty
from time import monotonic
from typing import TYPE_CHECKING, Any

from kombu.transport.redis import MultiChannelPoller
from kombu.utils.eventio import poll

from .sockets import Sockets

if TYPE_CHECKING:
    from ...consumer.consumer import Consumer
    from ..channel.channel import Channel

#: How long messages are handed out before the event loop has its turn.
HAND_OUT_SECONDS = 0.005

#: The longest poll of an event loop: a worker only sees a signal between two polls.
LONGEST_POLL_SECONDS = 0.25

#: `drain_events` without a timeout looks after its connections this often.
LONGEST_WAIT_SECONDS = 5.0


class Timer:
    """A timer of an event loop, which fires at the earliest of the times that it is given."""

    def __init__(self, loop: Any, on_time: Callable[[], None]) -> None:
        self._loop = loop
        self._on_time = on_time
        self._timer: Any = None
        self._at = math.inf

    def set(self, at: float) -> bool:
        """Set a time by the monotonic clock; returns whether it is earlier than the one before."""
        if at >= self._at:
            return False
        self.cancel()
        self._at = at
        self._timer = self._loop.call_later(max(at - monotonic(), 0), self._fire)
        return True

    def _fire(self) -> None:
        self._timer, self._at = None, math.inf
        self._on_time()

    def cancel(self) -> None:
        """Forget the time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._at = None, math.inf


class Poller(MultiChannelPoller):
    """Runs the consumers of its channels, and their pub/sub connections as Kombu does."""

    def __init__(self) -> None:
        super().__init__()
        self.sockets = Sockets(self.__dict__.pop("poller"))
        self._turn = 0
        self._due = True
        self._interrupted = False
        self._thread: int | None = None
        self._loop: Any = None
        self._timer: Timer | None = None
        self._duties: list[Any] = []

    def close(self) -> None:
        """Stop polling for good."""
        if self._loop is not None:
            self._loop.on_tick.discard(self.on_tick)
        if self._timer is not None:
            self._timer.cancel()
            for duty in self._duties:
                duty.cancel()
        self.sockets.close()
        self._channels.clear()

    def discard(self, channel: Channel) -> None:
        """Stop polling for a channel."""
        self._channels.discard(channel)
        self.sockets.forget(lambda watch: watch.channel is channel)

    def wake_up(self) -> bool:
        """Look after the channels soon, because something has changed.

        Returns whether that happens at the end of this turn of the event loop, in this thread.
        """
        self._due = True
        if threading.get_ident() == self._thread:
            return self._loop is not None
        if self.sockets.alarm is not None:
            self.sockets.alarm.ring()
        return False

    def interrupt(self) -> None:
        """Return to the program: `drain_events` ends once as if its time was over."""
        self._interrupted = True
        self.wake_up()

    def take_interrupt(self) -> bool:
        """Returns whether `drain_events` was interrupted, and resets that."""
        interrupted, self._interrupted = self._interrupted, False
        return interrupted

    def _on_connection_disconnect(self, connection: Any) -> None:
        """Stop polling a connection that is about to be closed."""
        if self.sockets.forget(lambda watch: watch.connection is connection):
            self.wake_up()

    def _watch(self, channel: Channel) -> float:
        """Poll the connections that a channel waits on; returns when to subscribe again."""
        if channel.consumer is not None:
            for part in channel.consumer.parts:
                self.sockets.watch(channel, part.wake.connection, part.take_token)
                if part.claims.pending:
                    self.sockets.watch(channel, channel.store.run, part.take_answers)
        if not channel.active_fanout_queues:
            return math.inf
        subscription = channel.subscription
        retry_at = subscription.keep()
        if retry_at == math.inf:
            self.sockets.watch(channel, channel.subclient.connection, subscription.read)
        return retry_at

    def on_readable(self, fileno: int) -> bool:
        """Read what has come on a connection; returns whether it was a message."""
        alarm = self.sockets.alarm
        if alarm is not None and fileno == alarm.fd:
            alarm.answer()
            return False
        watch = self.sockets.watched.get(fileno)
        if watch is None or not watch.is_open:
            self.sockets.poll_anew()
            return False
        is_message = watch.read()
        self._due = self._due or not is_message
        if watch.connection.false_alarm:
            self.sockets.poll_anew()
        return is_message

    # In Kombu's event loop.

    def attach(self, loop: Any) -> None:
        """Move to an event loop."""
        self._loop, self._timer = loop, Timer(loop, self._on_timer)
        self._due = True
        self.sockets.move_to(loop, self._on_events)
        loop.on_tick.add(self.on_tick)
        self.repeat(LONGEST_POLL_SECONDS, self._look_up)

    def repeat(self, interval_seconds: float, duty: Callable[[], None]) -> None:
        """Do a duty again and again for as long as this poller lives."""
        self._duties.append(self._loop.call_repeatedly(interval_seconds, duty))

    def _look_up(self) -> None:
        """Show that the loop is running. The timer that calls this also ends a poll."""
        for channel in tuple(self._channels):
            if channel.consumer is not None:
                channel.consumer.progress.stamp()

    def _on_timer(self) -> None:
        # The next tick does the work: an error surfaces there, but not in a timer.
        self._due = True

    def _on_events(self) -> None:
        events = self.sockets.poller.poll(0)
        for fd, _ in events:
            self.on_readable(fd)
        if not events:
            self.sockets.poll_anew()

    def on_tick(self) -> None:
        """Serve the channels before the loop polls."""
        self._thread = threading.get_ident()
        if self.sockets.poller.fd not in self._loop.readers:  # it was reset
            self.sockets.join_loop()
        if not self._due and not any(map(_needs_care, self._channels)):
            return
        self._due = False
        end = monotonic() + HAND_OUT_SECONDS
        next_at = math.inf
        for channel in tuple(self._channels):
            if channel.consumer is not None:
                channel.keep_up()
                next_at = min(next_at, self._serve(channel.consumer, end))
            next_at = min(next_at, self._watch(channel))
        if self._timer is not None and self._timer.set(next_at):
            self.sockets.set_alarm().ring()  # this turn's poll has its timeout already

    def _serve(self, consumer: Consumer, end: float) -> float:
        """Claim and hand out until nothing is left or the turn is over."""
        consumer.session.is_polled = True
        while True:
            at = consumer.step()
            has_some = is_over = False
            while not is_over and consumer.hand_out():
                has_some = True
                # A task that ran in this thread has left its ack there, to go before the next task.
                is_over = monotonic() >= end or bool(getattr(self._loop, "_ready", None))
            now = monotonic()
            if not has_some and now < at:
                return at
            self._due = self._due or is_over or now >= end
            # Celery's pool may have had its turn in this tick: it needs another one.
            self.sockets.set_alarm().ring()
            if is_over or now >= end or consumer.is_full:
                return at

    # In drain_events.

    def _after_fork(self) -> None:
        """A child that continues with its parent's connection must not touch the parent's epoll."""
        self.sockets = Sockets(poll())
        self._loop, self._timer = None, None

    def get(self, callback: Any, timeout: float | None = None) -> None:
        """Hand out one message or raise Empty when `timeout` seconds are over."""
        if os.getpid() != self.sockets.pid:
            self._after_fork()
        self.sockets.set_alarm()
        self._thread = threading.get_ident()
        self._in_protected_read = True
        try:
            self._get(math.inf if timeout is None else monotonic() + timeout)
        finally:
            self._in_protected_read = False
            while self.after_read:
                self.after_read.pop()()

    def _get(self, end: float) -> None:
        if refresh := getattr(self, "maybe_refresh_binding_expiry", None):  # Kombu 5.7
            refresh()
        if reauth := getattr(self, "maybe_reauth", None):
            reauth()
        if self._read_all(0):  # other input has its turn, however many messages are claimed
            return
        while True:
            next_at = self._step_all()
            consumers = [c.consumer for c in tuple(self._channels) if c.consumer is not None]
            claimed = any(consumer.has_messages for consumer in consumers)
            self._turn += 1
            turn = self._turn % max(len(consumers), 1)
            if any(consumer.hand_out() for consumer in consumers[turn:] + consumers[:turn]):
                return
            if claimed:  # but nothing was handed out: there may be more
                continue
            wait_seconds = min(end, next_at) - monotonic()
            if self._read_all(min(max(wait_seconds, 0), LONGEST_WAIT_SECONDS)):
                return
            if self.after_read or self._interrupted or monotonic() >= end:
                raise Empty

    def _read_all(self, wait_seconds: float) -> bool:
        """Read what comes within the time; returns whether a message was handed out."""
        consumers = [c.consumer for c in tuple(self._channels) if c.consumer is not None]
        for consumer in consumers:
            consumer.progress.waits(wait_seconds)
        try:
            events = self.sockets.poller.poll(wait_seconds)
        finally:
            for consumer in consumers:
                consumer.progress.stamp()
        messages = [self.on_readable(fd) for fd, _ in events or ()]
        return any(messages)

    def _step_all(self) -> float:
        next_at = math.inf
        for channel in tuple(self._channels):
            channel.resume()
            if channel.consumer is not None:
                channel.consumer.session.is_polled = False
                channel.consumer.progress.stamp()
                channel.keep_up()
                next_at = min(next_at, channel.consumer.step())
            next_at = min(next_at, self._watch(channel))
        return next_at


def _needs_care(channel: Channel) -> bool:
    consumer = channel.consumer
    can_claim = consumer is not None and consumer.idle and channel.qos.can_consume()
    return can_claim or channel.subscription.needs_care
