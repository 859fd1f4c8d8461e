"""Cancelling, changing and moving tasks that have not begun."""
