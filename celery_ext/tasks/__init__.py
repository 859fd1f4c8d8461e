"""What is known of one task, and how it is read, told and shown."""
