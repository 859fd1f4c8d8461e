"""Everything this library raises, under one root."""

from __future__ import annotations

import re

from kombu.exceptions import OperationalError
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
    """A broker URL has an unknown form."""


class ServerError(DelayedError):
    """The server cannot keep delayed messages safe."""


class AccessDenied(ServerError, exceptions.NoPermissionError, OperationalError):
    """The server allows its user too little: a command, a key or a channel is missing."""


class WrongType(DelayedError, exceptions.ResponseError, OperationalError):
    """A key of the broker was overwritten by another program."""


class FormatError(ServerError):
    """The messages in Redis have a format that is newer than this version of kombu-delayed."""


class ServerNotReady(DelayedError, exceptions.ConnectionError):
    """The server cannot take commands now: it is loading, is a replica, or is busy."""


class NodeDown(ServerNotReady):
    """A node of the Cluster cannot be reached. Queues on other nodes keep working."""


class ServerFull(DelayedError, OperationalError):
    """The server has no memory left for more messages; nothing was stored.

    Free memory or raise maxmemory. Stored messages can still be delivered.
    """


class NotReplicated(DelayedError):
    """A message is stored on the master, but not yet on enough replicas.

    It will run, and replicas get it when they can. If you send it again, a delayed message with a
    task id is stored once; a message without a delay runs twice.
    """


class AlreadyDelayed(DelayedError):
    """A task with the same unique key is already delayed, so this one was not sent.

    `task_id` is the id of the task that has the key.
    """

    def __init__(self, key: str = "", task_id: str = "") -> None:
        """`key` is the unique key that both tasks have."""
        self.key, self.task_id = key, task_id
        super().__init__(key, task_id)

    def __str__(self) -> str:
        known = f"task {self.task_id} with the unique key {self.key!r}"
        return f"{known} is delayed already, or has not ended"


class MessageError(DelayedError, ValueError):
    """A queue contains something that is not a message of Kombu."""


class CompressionError(DelayedError):
    """Compressed messages need Zstandard in this process: pip install 'kombu-delayed[zstd]'."""


class LeaseLost(DelayedError, ConnectionError):
    """This consumer's lease ended, so other consumers have its messages; it reconnects."""


class ReplicaError(ServerError, ConnectionError):
    """The server is a read-only replica, for good or until a failover ends."""


#: The server cannot be reached or cannot answer now, but may be able to soon.
UNREACHABLE: tuple[type[BaseException], ...] = (
    OSError,
    exceptions.ConnectionError,
    exceptions.TimeoutError,
)

_NO_SCRIPTS = re.compile(r"unknown command\W+(EVAL|EVALSHA)\b", re.IGNORECASE)
_DENIED = re.compile(r"\bNOPERM\b|ACL failure in script|user executing the script can't")
_NOT_READY = re.compile(r"\b(READONLY|MASTERDOWN|LOADING|BUSY|MISCONF|NOREPLICAS|CLUSTERDOWN)\b")


def translate(error: exceptions.ResponseError, database: int | None = None) -> Exception:
    """Return this library's error for an error of the server; our own faults stay unchanged.

    An error in a script has the server's code somewhere in its text, or has redis-py's class.
    """
    if isinstance(error, DelayedError):
        return error
    if isinstance(error, exceptions.NoPermissionError) or _DENIED.search(str(error)):
        return AccessDenied(
            f"the server denies its user something ({error}): its ACL LOG shows what, and the "
            "documentation's page Operations lists the rights that a user needs"
        )
    if "WRONGTYPE" in str(error):
        return WrongType(
            f"another program has overwritten a key of the broker ({error}): "
            "celery delayed doctor shows which"
        )
    if isinstance(error, exceptions.OutOfMemoryError) or re.search(r"\bOOM\b", str(error)):
        return ServerFull()
    if found := _NO_SCRIPTS.search(str(error)):
        return ServerError(
            f"the server knows no command {found[1].upper()}, which delayed messages need: it was "
            "renamed or disabled in its configuration (rename-command)"
        )
    if "DB index is out of range" in str(error):
        name = "of the number that" if database is None else f"{database}, which"
        return UrlError(f"the server has no database {name} the broker URL names")
    if str(error).startswith("UNBLOCKED"):  # what came before on this connection was carried out
        return exceptions.ConnectionError(f"the server has ended a wait: {error}")
    known = (exceptions.ReadOnlyError, exceptions.MasterDownError, exceptions.ClusterDownError)
    if isinstance(error, known) or _NOT_READY.search(str(error)):
        return ServerNotReady(f"the server cannot take commands now: {error}")
    return error
