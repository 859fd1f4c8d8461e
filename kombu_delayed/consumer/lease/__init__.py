"""The leases of consumers, and the thread that renews them."""
