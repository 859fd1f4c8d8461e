"""Who may run when: declared for a queue or a task, held over all workers together.

    broker_transport_options = {"delayed_policies": {"emails": [Window("05:00-07:00")]}}
    @app.task(policies=[Window("05:00-07:00")])

Importing this package, as everybody does who declares one, is all that is needed.
"""

from __future__ import annotations

from kombu_delayed.decisions import Bury, Delay, Drop, Run

from ..outcome_results import NotRun
from .catch_up import DropOlder, Latest, Spread
from .fair import Fair, Order
from .hand_over import HandOver
from .limit import Drain, Limit, Shares
from .message import Message
from .policy import Policy, PolicyError
from .retries import Attempt, Backoff, GiveUp, Retry, RetryStrategy
from .rules import use_rules
from .steps import watch_workers
from .throttler import Running, Throttler
from .timeout import Timeout
from .window import Window

__all__ = [
    "Attempt",
    "Backoff",
    "Bury",
    "Delay",
    "Drain",
    "Drop",
    "DropOlder",
    "Fair",
    "GiveUp",
    "HandOver",
    "Latest",
    "Limit",
    "Message",
    "NotRun",
    "Order",
    "Policy",
    "PolicyError",
    "Retry",
    "RetryStrategy",
    "Run",
    "Running",
    "Shares",
    "Spread",
    "Throttler",
    "Timeout",
    "Window",
]

use_rules()
watch_workers()
