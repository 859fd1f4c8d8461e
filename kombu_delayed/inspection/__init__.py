"""Looking at what is in the broker, changing it, and mending it, without a consumer."""
