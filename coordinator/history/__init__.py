"""Why things happened, kept for people to read."""
