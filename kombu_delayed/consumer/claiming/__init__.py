"""Claiming: from which queues a consumer claims messages, when, and how many."""
