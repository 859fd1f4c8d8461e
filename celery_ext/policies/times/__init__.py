"""Policies that decide when a message may run."""
