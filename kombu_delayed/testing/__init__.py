"""What programs need to test what they delay: a broker, a movable clock, states as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .broker import Broker, NotDone
    from .clock import Clock
    from .state import QueueState, dump, seed

__all__ = ["Broker", "Clock", "NotDone", "QueueState", "dump", "seed"]

_HOMES = {
    "Broker": "broker",
    "Clock": "clock",
    "NotDone": "broker",
    "QueueState": "state",
    "dump": "state",
    "seed": "state",
}


def __getattr__(name: str) -> Any:
    # FakeStore does without a server, and so without what the others import.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
