"""`Delayed` and its verbs: look up, cancel, move, count, back up, limit, ask."""
