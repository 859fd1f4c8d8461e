"""The sockets that are polled: connections on which channels wait, and an alarm."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from kombu.utils.eventio import ERR, READ, poll

if TYPE_CHECKING:
    from ..channel.channel import Channel

EVENTS = READ | ERR


class Watch(NamedTuple):
    """A descriptor that is polled, with its connection."""

    channel: Channel
    connection: Any
    socket: Any
    #: Reads what has come; returns whether that was a message.
    read: Callable[[], bool]

    @property
    def is_open(self) -> bool:
        """Whether the connection still has this socket, and the socket is open."""
        return self.connection._sock is self.socket and self.socket.fileno() >= 0


class PollSet:
    """Polls many descriptors behind a single one for an event loop, like one of Kombu's pollers.

    A descriptor that is closed while a forked child has its file open stays in an epoll, and so do
    its events. The event loop's epoll cannot be replaced, but a poll set can.
    """

    def __init__(self) -> None:
        self._selector: Any = selectors.DefaultSelector()
        #: The descriptor that is readable when one of them is.
        self.fd = int(self._selector.fileno())

    def register(self, fd: int, flags: int) -> None:
        """Poll a descriptor from now on."""
        self.unregister(fd)
        self._selector.register(fd, selectors.EVENT_READ)

    def unregister(self, fd: int) -> None:
        """Stop polling a descriptor."""
        with suppress(KeyError):
            self._selector.unregister(fd)

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        """The descriptors that are readable, each as (descriptor, flags)."""
        return [(key.fd, events) for key, events in self._selector.select(timeout)]

    def close(self) -> None:
        """Stop polling."""
        self._selector.close()


class Alarm:
    """Ends a poll early, from any thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._rung = False
        #: The descriptor to poll.
        self.fd = self._reader.fileno()

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


class Sockets:
    """Polls sockets with one of Kombu's pollers or, in an event loop, with a poll set."""

    def __init__(self, poller: Any) -> None:
        self.poller = poller
        self.alarm: Alarm | None = None
        #: Descriptor -> the connection that is polled. The alarm's is not in it.
        self.watched: dict[int, Watch] = {}
        self.pid = os.getpid()
        self._loop: Any = None
        self._on_events: Callable[[], None] | None = None

    def set_alarm(self) -> Alarm:
        """Poll an alarm, too."""
        if self.alarm is None:
            self.alarm = Alarm()
            self.poller.register(self.alarm.fd, EVENTS)
        return self.alarm

    def watch(self, channel: Channel, connection: Any, read: Callable[[], bool]) -> None:
        """Poll a connection, if it is open, and have it read by a function."""
        sock = getattr(connection, "_sock", None)
        if sock is None:
            return
        fd = sock.fileno()
        watch = self.watched.get(fd)
        if watch is not None and watch.socket is sock:
            return
        if watch is not None:
            self._unwatch(fd)
        self.watched[fd] = Watch(channel, connection, sock, read)
        self.poller.register(fd, EVENTS)

    def forget(self, condition: Callable[[Watch], bool]) -> bool:
        """Stop polling the connections that meet a condition; returns whether there were any."""
        found = [fd for fd, watch in tuple(self.watched.items()) if condition(watch)]
        for fd in found:
            self._unwatch(fd)
        return bool(found)

    def _unwatch(self, fd: int) -> None:
        self.watched.pop(fd, None)
        if os.getpid() != self.pid:
            return  # a forked child shares the parent's epoll
        try:
            self.poller.unregister(fd)
        except (KeyError, ValueError, OSError):  # closed by the other side already
            return

    def poll_anew(self) -> None:
        """Replace the poller, to be rid of a descriptor that had an event but is not watched."""
        self._leave_loop()
        self.poller.close()
        self.poller = poll() if self._loop is None else PollSet()
        self.watched = {fd: watch for fd, watch in self.watched.items() if watch.is_open}
        alarm = () if self.alarm is None else (self.alarm.fd,)
        for fd in (*self.watched, *alarm):
            self.poller.register(fd, EVENTS)

    def move_to(self, loop: Any, on_events: Callable[[], None]) -> None:
        """Have an event loop poll the sockets."""
        self._loop, self._on_events = loop, on_events
        self.poll_anew()
        self.set_alarm()
        self.join_loop()

    def join_loop(self) -> None:
        """Have the event loop poll the sockets, also after it was reset."""
        self._loop.add_reader(self.poller.fd, self._on_events)

    def _leave_loop(self) -> None:
        is_in = isinstance(self.poller, PollSet) and os.getpid() == self.pid
        if is_in and self._loop is not None:
            self._loop.remove_reader(self.poller.fd)

    def close(self) -> None:
        """Stop polling."""
        self.forget(lambda watch: True)
        self._leave_loop()
        if self.alarm is not None:
            self.alarm.close()
        if os.getpid() == self.pid:
            self.poller.close()
