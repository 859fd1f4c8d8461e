"""The layers around each request: identity, rate limits, headers, the access log."""
