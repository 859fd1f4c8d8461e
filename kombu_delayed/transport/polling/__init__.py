"""Waits for all channels of one connection: in Kombu's event loop or in `drain_events`."""
