"""Pages of policies, limits, pauses and tenants."""
