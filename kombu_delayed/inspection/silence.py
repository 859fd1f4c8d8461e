"""For how long a consumer is watched that renews its lease no more, before it counts as dead."""

from __future__ import annotations

import re

from ..connection.options import Options
from ..consumer.lease.consumer_id import lease_seconds_of

#: What the consumers are called that tasks are handed out to over HTTP. They renew no lease.
HTTP_CONSUMER = re.compile(r"http:\d+:[0-9a-f]{32}")


def silence_seconds(consumer: str) -> float:
    """The length of its lease, the default where an older version has named it; HTTP: 0."""
    if HTTP_CONSUMER.fullmatch(consumer):
        return 0.0
    return lease_seconds_of(consumer) or Options.lease_seconds
