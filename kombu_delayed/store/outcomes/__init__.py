"""Outcomes of tasks, and their counts over time."""
