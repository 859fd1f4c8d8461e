"""The ids of consumers, which contain the lengths of their leases."""

from __future__ import annotations

import os
import re
import secrets
import socket

from kombu_delayed.connection.options import Options

#: The names of consumers that receive tasks over HTTP. They renew no lease.
HTTP_CONSUMER = re.compile(r"http:\d+:[0-9a-f]{32}")

_LENGTH = re.compile(r":[0-9a-f]{8}-(\d+)$")


def consumer_id(name: str | None = None, lease_seconds: float | None = None) -> str:
    """A unique id for a consumer, with the length of its lease in milliseconds."""
    length = "" if lease_seconds is None else f"-{int(lease_seconds * 1000)}"
    return f"{name or socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}{length}"


def lease_seconds_of(consumer: str) -> float | None:
    """The length of a consumer's lease; None if an older version made the id."""
    found = _LENGTH.search(consumer)
    return int(found[1]) / 1000 if found else None


def silence_seconds(consumer: str) -> float:
    """How long a consumer that does not renew its lease is watched before it counts as dead.

    The length of its lease, or the default if an older version named it; HTTP: 0.
    """
    if HTTP_CONSUMER.fullmatch(consumer):
        return 0.0
    return lease_seconds_of(consumer) or Options.lease_seconds
