"""Writing a DataFrame into the backlog, exactly once."""
