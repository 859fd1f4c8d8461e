"""Two other APIs for the same backlog."""
