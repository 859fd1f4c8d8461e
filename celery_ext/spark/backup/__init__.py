"""The backlog in Parquet files and back, and what was missed meanwhile."""
