"""What may be decided of a message, and the moves that carry it out."""
