"""A real server for one machine, behind `delayed+embedded:///directory`."""

from __future__ import annotations

from .server import Status, ensure, find_server, status, stop

__all__ = ["Status", "ensure", "find_server", "status", "stop"]
