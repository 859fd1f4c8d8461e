"""Identifies callers: tokens, sessions, and rate limits."""
