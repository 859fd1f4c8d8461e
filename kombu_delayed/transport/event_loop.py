"""Waits for all channels of one connection: in Kombu's event loop or in `drain_events`."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable
from queue import Empty
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from kombu.transport.redis import MultiChannelPoller
from kombu.utils.eventio import poll

from ..connection.native import get_logger
from ..errors import UNREACHABLE
from .poll_set import PollSet

if TYPE_CHECKING:
    from ..consumer.consumer import Consumer
    from .channel import Channel

logger = get_logger(__name__)

#: How long messages are handed out before the event loop has its turn.
HAND_OUT_SECONDS = 0.005

#: A signal for the worker is seen between two polls of its event loop: none lasts longer.
LONGEST_POLL_SECONDS = 0.25

#: `drain_events` without a timeout looks after its connections this often.
LONGEST_WAIT_SECONDS = 5.0

LISTEN_RETRY_SECONDS = 0.5

WAKE, LISTEN = "WAKE", "LISTEN"


class Alarm:
    """Ends a poll early, from any thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._rung = False

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._reader.fileno()

    def ring(self) -> None:
        """End the poll."""
        if not self._rung:
            self._rung = True
            self._send()

    def _send(self) -> None:
        try:
            self._writer.send(b"\0")
        except OSError:  # the connection is closed already
            self._rung = False

    def answer(self) -> None:
        """Be ready to ring again."""
        try:
            self._reader.recv(64)
        except OSError:
            return
        finally:
            self._rung = False

    def close(self) -> None:
        """Free the descriptors."""
        self._reader.close()
        self._writer.close()


class Watch(NamedTuple):
    """What is known of a descriptor that is polled."""

    channel: Channel
    kind: str
    connection: Any
    socket: Any

    @property
    def is_open(self) -> bool:
        """Whether the connection has still this socket, and nobody has closed that."""
        return self.connection._sock is self.socket and self.socket.fileno() >= 0


class Poller(MultiChannelPoller):
    """Runs the consumers of its channels, and their pub/sub connections as Kombu does."""

    def __init__(self) -> None:
        super().__init__()
        self.poller: Any
        self._watched: dict[int, Watch] = {}
        self._alarm: Alarm | None = None
        self._pid = os.getpid()
        self._turn = 0
        self._due = True
        self._interrupted = False
        self._thread: int | None = None
        self._loop: Any = None
        self._ticking = False
        self._timer: Any = None
        self._timer_at = math.inf
        self._duties: list[Any] = []

    def _set_alarm(self) -> Alarm:
        if self._alarm is None:
            self._alarm = Alarm()
            self.poller.register(self._alarm.fileno(), self.eventflags)
        return self._alarm

    def close(self) -> None:
        """Stop polling for good."""
        for fd in tuple(self._watched):
            self._unwatch(fd)
        if self._loop is not None:
            self._loop.on_tick.discard(self.on_tick)
            self._leave_loop()
            self._cancel_timer()
            for duty in self._duties:
                duty.cancel()
        if self._alarm is not None:
            self._alarm.close()
        if os.getpid() == self._pid:
            self.poller.close()
        self._channels.clear()

    def discard(self, channel: Channel) -> None:
        """Poll for a channel no more."""
        self._channels.discard(channel)
        for fd, watch in tuple(self._watched.items()):
            if watch.channel is channel:
                self._unwatch(fd)

    def wake_up(self) -> None:
        """Something has changed: look after the channels soon."""
        self._due = True
        if self._alarm is not None and threading.get_ident() != self._thread:
            self._alarm.ring()

    def interrupt(self) -> None:
        """Let the program look around: `drain_events` ends as if its time was over, once."""
        self._interrupted = True
        self.wake_up()

    def take_interrupt(self) -> bool:
        """Whether `drain_events` was interrupted; asking ends that."""
        interrupted, self._interrupted = self._interrupted, False
        return interrupted

    def defers_acks(self) -> bool:
        """Whether an ack of this thread can wait for the end of the event loop's turn."""
        return self._loop is not None and threading.get_ident() == self._thread

    # What to watch.

    def _on_connection_disconnect(self, connection: Any) -> None:
        """A connection is about to be closed."""
        for fd, watch in tuple(self._watched.items()):
            if watch.connection is connection:
                self._unwatch(fd)
                self.wake_up()

    def _unwatch(self, fd: int) -> None:
        self._watched.pop(fd, None)
        if os.getpid() != self._pid:
            return  # a forked child shares the parent's epoll
        try:
            self.poller.unregister(fd)
        except (KeyError, ValueError, OSError):  # closed by the other side already
            return

    def _watch(self, channel: Channel, kind: str, connection: Any) -> None:
        sock = getattr(connection, "_sock", None)
        if sock is None:
            return
        fd = sock.fileno()
        watch = self._watched.get(fd)
        if watch is not None and watch.socket is sock:
            return
        if watch is not None:
            self._unwatch(fd)
        self._watched[fd] = Watch(channel, kind, connection, sock)
        self.poller.register(fd, self.eventflags)

    def _poll_anew(self) -> None:
        """An event was of nothing that is watched: poll what is, and not what it came from."""
        self._leave_loop()
        self.poller.close()
        self.poller = poll() if self._loop is None else PollSet()
        self._watched = {fd: watch for fd, watch in self._watched.items() if watch.is_open}
        alarm = () if self._alarm is None else (self._alarm.fileno(),)
        for fd in (*self._watched, *alarm):
            self.poller.register(fd, self.eventflags)

    def _listen(self, channel: Channel) -> float:
        """Keep the pub/sub connection subscribed; returns when to try again."""
        if monotonic() < channel.listen_retry_at:
            return channel.listen_retry_at
        try:
            self._subscribe(channel)
        except UNREACHABLE as error:
            self._listen_broken(channel, error)
            return channel.listen_retry_at
        channel.listen_broken_since = None
        self._watch(channel, LISTEN, channel.subclient.connection)
        return math.inf

    def _subscribe(self, channel: Channel) -> None:
        client = channel.subclient
        if client.connection is None:
            client.connection = client.connection_pool.get_connection()
        if not channel.hears_over(client.connection):
            client.connection.disconnect()
        if client.connection._sock is None:
            client.connection.connect()
        if not channel.listens:
            client.health_check_response_counter = 0  # what was asked over another connection
            channel._subscribe()
            channel.subscribed_queues = frozenset(channel.active_fanout_queues)
            channel.subscribed_over = client.connection._sock

    def _listen_broken(self, channel: Channel, error: BaseException) -> None:
        now = monotonic()
        channel._in_listen = None
        if channel.subclient.connection is not None:
            channel.subclient.connection.disconnect()
        if channel.listen_broken_since is None:
            channel.listen_broken_since = now
        if now - channel.listen_broken_since >= channel.patience_seconds:
            raise error
        logger.debug("Lost the pub/sub connection, trying again: %s", error)
        channel.listen_retry_at = max(now, channel.listen_retry_at + LISTEN_RETRY_SECONDS)

    # Looking after the channels.

    def _serve(self, consumer: Consumer, end: float) -> float:
        """Claim and hand out until nothing is left or the turn is over."""
        while True:
            at = consumer.step()
            if not consumer.has_messages and at > monotonic():
                return at
            is_over = self._hand_out(consumer, end)
            if self._ticking:
                # Celery's pool may have had its turn in this tick: it needs another one.
                self._set_alarm().ring()
            if is_over:
                self._due = True
                self._set_alarm().ring()
                return at

    def _hand_out(self, consumer: Consumer, end: float) -> bool:
        """Hand out until nothing is left; returns whether the event loop has to have its turn."""
        while consumer.has_messages:
            consumer.hand_out()
            # A task that ran in this very thread has left its ack there, for before the next one.
            if monotonic() >= end or getattr(self._loop, "_ready", None):
                return True
        return monotonic() >= end

    def _serve_all(self) -> None:
        self._due = False
        end = monotonic() + HAND_OUT_SECONDS
        next_at = math.inf
        for channel in tuple(self._channels):
            if channel.consumer is not None:
                channel.follow_shards()
                next_at = min(next_at, self._serve(channel.consumer, end))
                for wake in channel.consumer.wakes:
                    self._watch(channel, WAKE, wake.connection)
            if channel.active_fanout_queues:
                next_at = min(next_at, self._listen(channel))
        self._plan(next_at)

    def on_readable(self, fileno: int) -> bool:
        """Read what has come on a connection; returns whether it was a message."""
        if self._alarm is not None and fileno == self._alarm.fileno():
            self._alarm.answer()
            self._due = True
            return False
        watch = self._watched.get(fileno)
        if watch is None or not watch.is_open:
            self._poll_anew()
            return False
        is_message = self._read(watch)
        if watch.connection.told_in_vain:
            self._poll_anew()
        return is_message

    def _read(self, watch: Watch) -> bool:
        if watch.kind == LISTEN:
            return self._read_fanout(watch.channel)
        if watch.channel.consumer is not None:
            watch.channel.consumer.take_token(watch.connection)
        self._due = True
        return False

    def _read_fanout(self, channel: Channel) -> bool:
        try:
            return bool(channel._receive())
        except UNREACHABLE as error:
            connection = channel.subclient.connection
            if channel._in_listen and _is_open(connection):
                raise  # not the connection's: the program's own
            self._listen_broken(channel, error)
            self._due = True
            return False

    # In Kombu's event loop.

    def attach(self, loop: Any) -> None:
        """Move to an event loop."""
        self._loop = loop
        self._due = True
        self._poll_anew()
        self._set_alarm()
        self._join_loop()
        loop.on_tick.add(self.on_tick)
        self.repeat(LONGEST_POLL_SECONDS, self._look_up)

    def _look_up(self) -> None:
        """A timer ends a poll; besides, it shows that the loop goes on."""
        for channel in tuple(self._channels):
            if channel.consumer is not None:
                channel.consumer.progress.stamp()

    def _join_loop(self) -> None:
        fd = self.poller.fileno()
        if fd not in self._loop.readers:  # the first time, or after the loop was reset
            self._loop.add_reader(fd, self._on_events)

    def _leave_loop(self) -> None:
        is_in = isinstance(self.poller, PollSet) and os.getpid() == self._pid
        if is_in and self._loop is not None:
            self._loop.remove_reader(self.poller.fileno())

    def _on_events(self) -> None:
        events = self.poller.poll(0)
        for fd, _ in events:
            self.on_readable(fd)
        if not events:
            self._poll_anew()

    def repeat(self, interval_seconds: float, duty: Callable[[], None]) -> None:
        """Do a duty again and again for as long as this poller lives."""
        self._duties.append(self._loop.call_repeatedly(interval_seconds, duty))

    def on_tick(self) -> None:
        """Before the loop polls."""
        self._thread = threading.get_ident()
        self._join_loop()
        if not self._due and not any(map(_needs_care, self._channels)):
            return
        self._ticking = True
        try:
            self._serve_all()
        finally:
            self._ticking = False

    def _on_timer(self) -> None:
        # The tick that follows does it: what fails there surfaces, what fails in a timer does not.
        self._timer, self._timer_at, self._due = None, math.inf, True

    def _plan(self, at: float) -> None:
        if self._loop is None or at >= self._timer_at:
            return
        self._cancel_timer()
        self._timer_at = at
        self._timer = self._loop.call_later(max(at - monotonic(), 0), self._on_timer)
        if self._ticking:  # this turn's poll has its timeout already
            self._set_alarm().ring()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, math.inf

    # In drain_events.

    def _after_fork(self) -> None:
        """A child that goes on with its parent's connection must not touch the parent's epoll."""
        self._pid = os.getpid()
        self.poller = poll()
        self._watched.clear()
        self._loop, self._alarm = None, None

    def get(self, callback: Any, timeout: float | None = None) -> None:
        """Hand out one message or raise Empty when `timeout` seconds are over."""
        if os.getpid() != self._pid:
            self._after_fork()
        self._set_alarm()
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
        if self._read_all(0):  # however many messages are at hand, what else has come gets its turn
            return
        while True:
            next_at = self._step_all()
            consumers = [c.consumer for c in tuple(self._channels) if c.consumer is not None]
            claimed = any(consumer.has_messages for consumer in consumers)
            self._turn += 1
            turn = self._turn % max(len(consumers), 1)
            if any(consumer.hand_out() for consumer in consumers[turn:] + consumers[:turn]):
                return
            if claimed:  # and none of it for this program: there may be more
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
            events = self.poller.poll(wait_seconds)
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
                channel.follow_shards()
                next_at = min(next_at, channel.consumer.step())
                for wake in channel.consumer.wakes:
                    self._watch(channel, WAKE, wake.connection)
            if channel.active_fanout_queues:
                next_at = min(next_at, self._listen(channel))
        return next_at


def _is_open(connection: Any) -> bool:
    """Whether the server has not closed a connection."""
    if connection is None or connection._sock is None:
        return False
    try:
        connection.can_read(timeout=0)
    except UNREACHABLE:
        return False
    return True


def _can_claim(channel: Channel) -> bool:
    return channel.consumer is not None and channel.consumer.idle and channel.qos.can_consume()


def _needs_care(channel: Channel) -> bool:
    return _can_claim(channel) or (
        bool(channel.active_fanout_queues)
        and not channel.listens
        and monotonic() >= channel.listen_retry_at
    )
