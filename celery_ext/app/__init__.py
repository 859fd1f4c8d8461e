"""What belongs to one app: its broker, queues, settings and signals."""
