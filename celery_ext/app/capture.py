"""Runs Celery's own sending code, but keeps the messages instead of sending them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from celery import Celery
from kombu.exceptions import OperationalError

from kombu_delayed.transport.channel.channel import Channel

from .unique_outcomes import hearing

#: The app whose call runs in this context, and its producer.
_current: ContextVar[tuple[Celery, Any] | None] = ContextVar("producer", default=None)


class Captured(NamedTuple):
    """A message that a channel would send.

    `verb` is "schedule" or "put" with a queue, an entry and the queue's expiry in ms as `given`, or
    "publish" with a topic and a text, or "sent" with the outcome of a message with a unique key. A
    channel sends such a message at once, because the answer decides.
    """

    verb: str
    given: tuple[Any, ...]


class Capture:
    """Stands in for a channel: routes and declares as it does, and keeps what it would send."""

    #: The rules plan the messages later, when they are really sent.
    plans_later = True

    def __init__(self, app: Celery, channel: Channel) -> None:
        self._channel = channel
        self._messages: list[Captured] = []
        self._at_once: Callable[[list[Captured]], None] | None = None
        self._current = app, app.amqp.Producer(self)
        _use_current(app)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def basic_publish(self, message: Any, exchange: str, routing_key: str, **kwargs: Any) -> Any:
        kwargs["_publish_batch"] = self
        with hearing() as sent:
            found = self._channel.basic_publish(message, exchange, routing_key, **kwargs)
        self._messages += [Captured("sent", (each.outcome,)) for each in sent]
        if self._at_once is not None:
            self._at_once(self._messages)
            self._messages = []
        return found

    def add(self, verb: str, *given: Any) -> None:
        """Keep a message. The channel calls this for each queue that the message goes to."""
        self._messages.append(Captured(verb, given))

    def of(
        self,
        send: Callable[..., Any],
        *args: Any,
        at_once: Callable[[list[Captured]], None] | None = None,
        **options: Any,
    ) -> list[Captured]:
        """Return the messages of a call to Celery, or pass them to `at_once` if it is given.

        Raises the errors of the call, and then keeps no messages.
        """
        self._messages, self._at_once = [], at_once
        token = _current.set(self._current)
        try:
            send(*args, **options)
            return self._messages
        except AttributeError as error:  # from Kombu, for a channel that lost its connection
            if not self._channel.closed:
                raise
            raise OperationalError(
                "the connection was closed meanwhile, as another thread has lost the broker"
            ) from error
        finally:
            _current.reset(token)
            self._messages = []


def _use_current(app: Celery) -> None:
    """Let the app return the current producer, as the parts of a canvas ask the app for one."""
    acquire = app.producer_or_acquire
    if not hasattr(acquire, "uses_current"):

        def producer_or_acquire(producer: Any = None) -> Any:
            sender, current = _current.get() or (None, None)
            return acquire(producer or (current if sender is app else None))

        producer_or_acquire.uses_current = True  # type: ignore[attr-defined]
        app.producer_or_acquire = producer_or_acquire
