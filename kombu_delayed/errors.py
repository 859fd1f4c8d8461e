"""Everything this library raises, under one root."""

from __future__ import annotations

from redis import exceptions


class DelayedError(Exception):
    """Delayed delivery failed."""

    def __init__(self, *args: object) -> None:
        """Without arguments the message is the docstring of the class."""
        super().__init__(*(args or (type(self).__doc__ or type(self).__name__,)))


class EmbeddedServerError(DelayedError):
    """The embedded server cannot be started, reached or stopped."""


class OptionError(DelayedError, ValueError):
    """A transport option has a wrong name or value."""


class UrlError(DelayedError, ValueError):
    """A broker URL has a form that this transport does not know."""


class ServerError(DelayedError):
    """The server cannot keep delayed messages safe."""


class MessageError(DelayedError, ValueError):
    """What was found in a queue is not a message of Kombu's."""


class LeaseLost(DelayedError, ConnectionError):
    """This consumer's lease ended, so others have taken over its messages; it starts anew."""


class ReplicaError(ServerError, ConnectionError):
    """The server is a read-only replica, for good or until a failover ends."""


#: The server cannot be reached or cannot answer now; it may soon.
UNREACHABLE: tuple[type[BaseException], ...] = (
    OSError,
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.MasterDownError,
)
