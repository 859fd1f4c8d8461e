"""The parts of one message: its envelope, its wait, its ticket; and lengths of time."""
