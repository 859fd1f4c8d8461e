"""Policies in Redis: declared, overridden, paused."""
