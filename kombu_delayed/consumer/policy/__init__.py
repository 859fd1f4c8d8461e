"""Decisions about a message, the moves that carry them out, and the slots it occupies."""
