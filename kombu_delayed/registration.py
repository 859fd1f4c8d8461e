"""Makes Kombu know the URL schemes, and Celery's workers those of our extension.

Kombu loads the entry points of the group `kombu.serializers` with its serializers, which all that
imports Celery does; ours leads here, so that `delayed+redis://` works with no import line. It must
stay light: it runs while Kombu itself is being imported.
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
    """Let the workers of this process end well, where it has Celery; twice is safe.

    A worker asks its transport what it can do just before it tells that it begins: in time for the
    extension to hear of that, though nobody has imported it.
    """
    if sys.modules.get("celery"):
        import_module("celery_ext.worker.hooks")


register()

#: What the entry point stands for: plain JSON under a name that nothing asks for.
serializer = (dumps, loads, "application/x-kombu-delayed+json", "utf-8")
