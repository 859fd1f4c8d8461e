"""Connections to the master that the Sentinels name."""
