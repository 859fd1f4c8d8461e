"""The parts that belong to one app: its broker, queues, settings and signals."""
