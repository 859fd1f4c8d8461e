"""The whole backlog to a file and back."""
