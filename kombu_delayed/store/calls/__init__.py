"""Loads, calls and measures the scripts, and chooses the shard in which they run."""
