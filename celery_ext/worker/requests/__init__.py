"""The handling of one task in a worker: policies, outcomes, uniqueness."""
