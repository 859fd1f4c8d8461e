"""Registers the URL schemes with Kombu, and the hooks of `celery_ext` with Celery's workers.

Kombu loads the entry points of the group `kombu.serializers` with its serializers, as every program
that imports Celery does. Ours leads to this module, so that `delayed+redis://` works without an
import line. The module must stay light: it runs while Kombu itself is being imported.
"""

from __future__ import annotations

import sys
from importlib import import_module

from kombu.transport import TRANSPORT_ALIASES
from kombu.utils.json import dumps, loads

SCHEMES = (
    *("redis", "rediss", "socket", "embedded"),
    *("sentinel", "sentinels", "rediscluster", "redisclusters"),
)


def register() -> None:
    """Add `delayed` and `delayed+…` to Kombu's transports; twice is safe."""
    TRANSPORT_ALIASES["delayed"] = "kombu_delayed.transport.transport:Transport"
    for scheme in SCHEMES:
        TRANSPORT_ALIASES[f"delayed+{scheme}"] = "kombu_delayed.transport.transport:Transport"


def watch_workers() -> None:
    """Import the hooks of `celery_ext` if this process has imported Celery. Idempotent.

    They make workers return messages that they have not started. A worker creates its transport
    just before it sends the signal `worker_init`, so the hooks receive it even if no other code has
    imported them.
    """
    if sys.modules.get("celery"):
        import_module("celery_ext.worker.hooks")


register()

#: The object of the entry point: plain JSON under a name that is never requested.
serializer = (dumps, loads, "application/x-kombu-delayed+json", "utf-8")
