"""Remote control commands of a worker."""
