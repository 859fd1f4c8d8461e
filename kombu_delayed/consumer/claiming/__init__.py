"""Which messages a consumer claims: of which queues, when, and how many."""
