"""HTTP jobs: posts callbacks, signs them, and keeps them out of the internal network."""
