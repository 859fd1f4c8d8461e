"""Policies that are enforced across all workers, at the gate of a queue."""
