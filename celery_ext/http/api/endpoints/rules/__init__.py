"""Endpoints of limits, pauses and tenants."""
