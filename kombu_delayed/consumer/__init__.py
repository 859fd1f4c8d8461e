"""Consumers: they claim messages, hand them out, ack them, and keep their leases."""
