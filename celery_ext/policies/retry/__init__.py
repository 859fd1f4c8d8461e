"""Retry strategies, and how tasks follow them."""
