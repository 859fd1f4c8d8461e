"""Connections to the nodes of a Redis Cluster."""
