"""Jobs that are HTTP calls: what posts them, signs them, and guards the inner network."""
