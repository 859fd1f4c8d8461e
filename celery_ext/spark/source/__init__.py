"""Reading the backlog into a DataFrame."""
