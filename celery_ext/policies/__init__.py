"""Policies: when the tasks of a queue, or one task, may run, enforced across all workers.

    broker_transport_options = {"delayed_policies": {"emails": [Window("05:00-07:00")]}}
    @app.task(policies=[Window("05:00-07:00")])

Importing this package is enough to make workers apply them.
"""

from __future__ import annotations

from kombu_delayed.consumer.policy.decisions import Bury, Delay, Drop, Run

from ..tasks.results import NotRun
from .hand_over import HandOver
from .limits.fair import Fair, Order
from .limits.limit import Drain, Limit, LimitUse, Shares
from .limits.throttler import Running, RunningTask, Throttler
from .message import Message
from .policy import Policy, PolicyError
from .retry.strategies import Attempt, Backoff, GiveUp, Retry, RetryStrategy
from .rules import use_rules
from .steps import watch_workers
from .times.catch_up import DropOlder, Latest, Spread
from .times.timeout import Timeout
from .times.window import Window

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
    "LimitUse",
    "Message",
    "NotRun",
    "Order",
    "Policy",
    "PolicyError",
    "Retry",
    "RetryStrategy",
    "Run",
    "Running",
    "RunningTask",
    "Shares",
    "Spread",
    "Throttler",
    "Timeout",
    "Window",
]

use_rules()
watch_workers()
