"""What may be decided of a message, the moves that carry it out, and the slots it occupies."""
