"""Policies of when a message may run."""
