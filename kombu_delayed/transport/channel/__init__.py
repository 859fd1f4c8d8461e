"""The Kombu side of one channel: a base class for each of its duties, and its own objects."""
