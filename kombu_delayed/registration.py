"""Makes Kombu know the URL schemes.

Kombu loads the entry points of the group `kombu.serializers` in every process that imports it; ours
leads here, so that `delayed+redis://` works in any program with no import line. It must stay light:
it runs while Kombu itself is being imported.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import TRANSPORT_ALIASES

SCHEMES = (
    "redis",
    "rediss",
    "socket",
    "embedded",
    "sentinel",
    "sentinels",
    "rediscluster",
    "redisclusters",
)


def register() -> None:
    """Add `delayed` and `delayed+…` to Kombu's transports; twice is safe."""
    TRANSPORT_ALIASES["delayed"] = "kombu_delayed.transport:Transport"
    for scheme in SCHEMES:
        TRANSPORT_ALIASES[f"delayed+{scheme}"] = "kombu_delayed.transport:Transport"


def _dumps(value: Any) -> str:
    from kombu.utils.json import dumps

    return dumps(value)


def _loads(text: Any) -> Any:
    from kombu.utils.json import loads

    return loads(text)


register()

#: What the entry point stands for: plain JSON under a name that nothing asks for.
serializer = (_dumps, _loads, "application/x-kombu-delayed+json", "utf-8")
