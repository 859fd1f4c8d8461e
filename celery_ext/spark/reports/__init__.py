"""What the archive of events says: figures, charts, a page, a forecast."""
