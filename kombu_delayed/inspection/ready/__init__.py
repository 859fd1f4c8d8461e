"""Messages in the ready lists, and their index by id."""
