"""What a worker does around one task: policies, outcomes, uniqueness."""
