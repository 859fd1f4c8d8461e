"""Sends many tasks in few calls."""
