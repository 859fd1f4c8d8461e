"""Many tasks in few calls."""
