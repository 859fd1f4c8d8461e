"""The keys in Redis, and the scripts that move messages among them."""
