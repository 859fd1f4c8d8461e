"""Lifecycle events as a stream, and their archive."""
