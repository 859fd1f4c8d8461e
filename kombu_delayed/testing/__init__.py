"""What programs need to test what they delay: a broker, a movable clock, states as data."""

from .broker import Broker, NotDone
from .clock import Clock
from .state import QueueState, dump, seed

__all__ = ["Broker", "Clock", "NotDone", "QueueState", "dump", "seed"]
