"""Moves messages from the stock Redis transport to this one, and back.

python -m kombu_delayed.migrate to-delayed redis://localhost:6379/0
"""

from __future__ import annotations

from .hand_back import ToStock
from .migration import Entry, Left, Migration, Move, Report
from .runs import (
    FAILURES,
    Direction,
    MigrationRefused,
    open_channel,
    plan,
    to_delayed,
    to_stock,
)
from .take_over import ToDelayed

__all__ = [
    "FAILURES",
    "Direction",
    "Entry",
    "Left",
    "Migration",
    "MigrationRefused",
    "Move",
    "Report",
    "ToDelayed",
    "ToStock",
    "open_channel",
    "plan",
    "to_delayed",
    "to_stock",
]
