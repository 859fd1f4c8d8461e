"""Pages of single tasks and of the backlog, and what changes them."""
