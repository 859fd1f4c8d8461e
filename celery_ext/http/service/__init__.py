"""The objects that all requests of a server share."""
