"""Information about one task: how it is read, reported and displayed."""
