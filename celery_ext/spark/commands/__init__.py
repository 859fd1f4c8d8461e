"""The jobs at the command line: one module for each kind, found by being in this package."""
