"""Policies that are held over all workers together, at the gate of a queue."""
