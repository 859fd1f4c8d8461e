"""Commands about queues and their consumers."""
