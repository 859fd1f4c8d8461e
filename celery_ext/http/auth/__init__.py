"""Who calls: tokens, sessions, and how often they may."""
