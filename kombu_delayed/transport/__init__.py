"""The side that Kombu sees: the transport, its channels and its event loop."""
