"""What all requests of a server share."""
