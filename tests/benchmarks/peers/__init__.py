"""The same four measurements of other queues: `python -m tests.benchmarks peers`."""
