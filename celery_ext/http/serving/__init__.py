"""The server process, and the worker beside it."""
