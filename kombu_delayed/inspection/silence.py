"""How long a consumer that does not renew its lease is watched before it counts as dead."""

from __future__ import annotations

import re

from ..connection.options import Options
from ..consumer.lease.consumer_id import lease_seconds_of

#: The names of consumers that receive tasks over HTTP. They renew no lease.
HTTP_CONSUMER = re.compile(r"http:\d+:[0-9a-f]{32}")


def silence_seconds(consumer: str) -> float:
    """Return the length of its lease, or the default if an older version named it; HTTP: 0."""
    if HTTP_CONSUMER.fullmatch(consumer):
        return 0.0
    return lease_seconds_of(consumer) or Options.lease_seconds
