"""Test helpers: a broker, a clock that you move, states as plain data."""

from .broker import Broker, NotDone
from .clock import Clock
from .state import QueueState, dump, seed

__all__ = ["Broker", "Clock", "NotDone", "QueueState", "dump", "seed"]
