"""What one message says: its envelope, its wait, its ticket, lengths of time."""
