"""A real server for one machine, behind `delayed+embedded:///directory`."""

from __future__ import annotations

from .binary import find_server
from .server import Status, ensure, status, stop

__all__ = ["Status", "ensure", "find_server", "status", "stop"]
