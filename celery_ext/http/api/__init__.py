"""The HTTP API: its operations, what they take and give."""
