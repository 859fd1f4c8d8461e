"""Endpoints that list or search tasks."""
