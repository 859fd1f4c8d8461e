"""Inspects, changes and repairs the contents of the broker, without a consumer."""
