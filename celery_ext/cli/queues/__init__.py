"""Commands about queues and who consumes them."""
