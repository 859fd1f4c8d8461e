"""Limits, pauses and other policies that operators read and change in Redis."""
