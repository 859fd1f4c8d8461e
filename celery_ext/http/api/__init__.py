"""The HTTP API: its operations, and their requests and answers."""
