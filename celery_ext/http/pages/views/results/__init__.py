"""Pages of failures, dead letters and trends."""
