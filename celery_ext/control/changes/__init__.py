"""Cancels, changes and moves tasks that have not started."""
